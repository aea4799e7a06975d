"""Processors that drop improbable tokens. At temperature 0 they are skipped: none drops the most probable token.

A new filter is a class here, an entry of FILTERS, and its fields in `SamplingFields`.
"""

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_p

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.processors.processor import LogitsProcessor, Paths


class TopK(LogitsProcessor):
    """Keeps the k most probable tokens and all ties with the k-th. So the order of ids does not matter."""

    fields = ("top_k",)

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return sampling.top_k > 0 and not sampling.greedy

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._count = start.sampling.top_k

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        if self._count >= logits.shape[-1]:
            return logits
        smallest_kept = mx.topk(logits, self._count, axis=-1).min(axis=-1, keepdims=True)
        return mx.where(logits < smallest_kept, -mx.inf, logits)


class TopPMinP(LogitsProcessor):
    """Top-p, then min-p. One processor for both: to normalise the log-probabilities again between them would change the
    last bits."""

    fields = ("top_p", "min_p")

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return (sampling.top_p < 1.0 or sampling.min_p > 0.0) and not sampling.greedy

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._top_p = start.sampling.top_p
        self._min_p = start.sampling.min_p

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._top_p < 1.0:
            kept = apply_top_p(kept, self._top_p)
        if self._min_p > 0.0:
            kept = apply_min_p(kept, self._min_p)
        return mx.where(mx.isneginf(kept), -mx.inf, logits)


FILTERS: tuple[type[LogitsProcessor], ...] = (TopK, TopPMinP)
"""In the order of application."""
