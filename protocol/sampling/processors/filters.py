"""Processors that drop improbable tokens. At temperature 0 they are skipped: none drops the most probable token.

A new filter is a class here, an entry of FILTERS, and its fields in `SamplingFields`.
"""

import math

import mlx.core as mx

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.nucleus import least_of_nucleus
from protocol.sampling.processors.processor import LogitsProcessor, Paths
from protocol.sampling.top_tokens import log_total, top_values


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
        smallest_kept = top_values(logits, self._count)[:, -1:]
        return mx.where(logits < smallest_kept, -mx.inf, logits)


class TopPMinP(LogitsProcessor):
    """Top-p, then min-p, each with all ties with the least probable token that it keeps.

    One processor for both: to normalise the log-probabilities again between them would change the last bits.
    """

    fields = ("top_p", "min_p")

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return (sampling.top_p < 1.0 or sampling.min_p > 0.0) and not sampling.greedy

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._top_p = start.sampling.top_p
        self._min_p = start.sampling.min_p

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        logs = logits - log_total(logits)
        least = mx.array(-mx.inf)
        if self._top_p < 1.0:
            least = least_of_nucleus(logs, self._top_p)
        if self._min_p > 0.0:
            least = mx.maximum(least, logs.max(axis=-1, keepdims=True) + math.log(self._min_p))
        return mx.where(logs < least, -mx.inf, logits)


FILTERS: tuple[type[LogitsProcessor], ...] = (TopK, TopPMinP)
"""In the order of application."""
