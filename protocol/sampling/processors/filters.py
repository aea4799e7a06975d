"""Processors that drop improbable tokens. At temperature 0 they are skipped: none drops the most probable token.

The nucleus of top-p is the smallest set of most probable tokens that reaches a mass (Holtzman, Buys, Du, Forbes and
Choi, "The Curious Case of Neural Text Degeneration", ICLR 2020, section 3.1).

A new filter is a class here, an entry of FILTERS, and its fields in `SamplingFields`.
"""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import Grammars
from protocol.sampling.processors.processor import LogitsProcessor, Paths
from protocol.sampling.top_tokens import log_total, top_values


class TopK(LogitsProcessor):
    """Keeps the k most probable tokens and all ties with the k-th. So the order of ids does not matter."""

    fields = ("top_k",)
    reads_paths = False

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
    reads_paths = False

    @classmethod
    def wanted(cls, sampling: Sampling) -> bool:
        return (sampling.top_p < 1.0 or sampling.min_p > 0.0) and not sampling.greedy

    def __init__(self, start: Start, grammars: Grammars) -> None:
        self._top_p = start.sampling.top_p
        self._min_p = start.sampling.min_p

    def apply(self, logits: mx.array, paths: Paths) -> mx.array:
        logs = logits - log_total(logits)
        return self._kept(logits, logs, self._least(logs, least_of_nucleus))

    def begin(self, logits: mx.array, paths: Paths) -> mx.array:
        logs = logits - log_total(logits)
        least = self._least(logs, least_of_shortlist)
        return mx.where(mx.isnan(least), mx.nan, self._kept(logits, logs, least))

    def _least(self, logs: mx.array, of_nucleus: Callable[[mx.array, float], mx.array]) -> mx.array:
        return of_nucleus(logs, self._top_p) if self._top_p < 1.0 else mx.array(-mx.inf)

    def _kept(self, logits: mx.array, logs: mx.array, least: mx.array) -> mx.array:
        if self._min_p > 0.0:
            least = mx.maximum(least, logs.max(axis=-1, keepdims=True) + math.log(self._min_p))
        return mx.where(logs < least, -mx.inf, logits)


FILTERS: tuple[type[LogitsProcessor], ...] = (TopK, TopPMinP)
"""In the order of application."""


_SHORTLIST = 256
"""Most nuclei have fewer tokens."""
_GROWTH = 16


def least_of_shortlist(logs: mx.array, mass: float) -> mx.array:
    """As `least_of_nucleus`, not yet computed, and NaN for a row whose nucleus may be larger than the shortlist."""
    best = top_values(logs, min(_SHORTLIST, logs.shape[-1]))
    outside = mx.cumsum(mx.exp(best), axis=-1) >= mass
    least = mx.take_along_axis(best, mx.argmax(outside, axis=-1, keepdims=True), axis=-1)
    beyond = -mx.inf if best.shape[-1] == logs.shape[-1] else mx.nan
    return mx.where(outside.any(axis=-1, keepdims=True), least, beyond)


def least_of_nucleus(logs: mx.array, mass: float) -> mx.array:
    """(L, 1) float32: the least log-probability in each row's nucleus, the lowest one with less than `mass` above it.

    `logs`: (L, V) float32 log-probabilities. Masses are summed from the most probable token down, those of a shortlist
    in float32, so that the device need not be waited for, and in float64 where it does not suffice. A row's result does
    not depend on the other rows. -inf for a row of NaN.
    """
    least = np.array(least_of_shortlist(logs, mass), np.float32)
    for row in np.flatnonzero(np.isnan(least)):
        least[row] = _searched(logs[int(row)], mass)
    return mx.array(least)


def _searched(row: mx.array, mass: float) -> float:
    """The least log-probability in the nucleus of a (V,) row, by shortlists longer than the first one."""
    rising = -np.asarray(row, np.float32)
    count = _SHORTLIST
    while count < len(rising):
        count = min(_GROWTH * count, len(rising))
        best = -np.sort(np.partition(rising, count - 1)[:count])
        outside = np.flatnonzero(np.cumsum(np.exp(best.astype(np.float64)))[:-1] >= mass)
        if len(outside):
            return float(best[outside[0]])
    return -np.inf
