"""Processors that drop improbable tokens. At temperature 0 they are skipped: none drops the most probable token.

The nucleus of top-p is the smallest set of most probable tokens that reaches a mass (Holtzman, Buys, Du, Forbes and
Choi, "The Curious Case of Neural Text Degeneration", ICLR 2020, section 3.1).

A new filter is a class here, an entry of FILTERS, and its fields in `SamplingFields`.
"""

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
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


_SHORTLIST = 256
"""Most nuclei have fewer tokens."""
_GROWTH = 16


def least_of_nucleus(logs: mx.array, mass: float) -> mx.array:
    """(L, 1) float32: the least log-probability in each row's nucleus, the lowest one with less than `mass` above it.

    `logs`: (L, V) float32 log-probabilities. Masses are summed in float64 from the most probable token down, so a row's
    result depends neither on the other rows nor on the length of the shortlist. -inf for a row of NaN.
    """
    count = min(_SHORTLIST, logs.shape[-1])
    least = [_least(best, mass) for best in np.asarray(top_values(logs, count))]
    least = [_searched(logs[row], mass, count) if found is None else found for row, found in enumerate(least)]
    return mx.array(least, dtype=mx.float32)[:, None]


def _least(best: npt.NDArray[np.float32], mass: float) -> float | None:
    """`best`: the highest log-probabilities of a row, falling. None if the nucleus may be larger."""
    above = np.cumsum(np.exp(best.astype(np.float64)))[:-1]
    outside = np.flatnonzero(above >= mass)
    return float(best[outside[0]]) if len(outside) else None


def _searched(row: mx.array, mass: float, count: int) -> float:
    """The least log-probability in the nucleus of a (V,) row, by shortlists longer than `count`."""
    rising = -np.asarray(row, np.float32)
    while count < len(rising):
        count = min(_GROWTH * count, len(rising))
        found = _least(-np.sort(np.partition(rising, count - 1)[:count]), mass)
        if found is not None:
            return found
    return -np.inf
