"""The nucleus of top-p: the smallest set of most probable tokens that reaches a mass. Knows no other filter.

Holtzman, Buys, Du, Forbes and Choi, "The Curious Case of Neural Text Degeneration" (ICLR 2020), section 3.1.
"""

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.sampling.top_tokens import top_values

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
    rising = -np.asarray(row)
    while count < len(rising):
        count = min(_GROWTH * count, len(rising))
        found = _least(-np.sort(np.partition(rising, count - 1)[:count]), mass)
        if found is not None:
            return found
    return -np.inf
