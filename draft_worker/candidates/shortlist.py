"""Candidates out of a vocabulary's logits without sorting it, in numpy. Knows no model, no tree and no MLX.

A token's score is logit / T plus Gumbel noise. Who is to be among the best needs a high logit or a peak of
noise, so noise is added only to the tokens with a peak and to those whose logit could win with the most noise
that is no peak. The tokens found are those of the full computation. Their probabilities are estimates: the
mass of the others, each of them small, is taken from a sample of them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draft_worker.candidates.noise_prefetch import PEAK, Heights, Ids, PositionNoise
from protocol.speculation.candidates import Candidates

ROWS = 64
"""A row of logits must be a multiple of this long: pad it with -inf."""
_WHOLE = 1 << 14
"""Up to this length the mass of the tail is summed, not sampled."""
_STRIDE = 16
_EXACT = 256
"""Tokens at least whose mass is summed, not sampled, where there is no noise."""
_SLACK = 1e-3
"""Added to what noise may be, against rounding: it lets a few more tokens survive."""
_TAIL_MASS = 3.4372
"""E[exp(g); g <= PEAK] of Gumbel noise g: the exponential integral E1(exp(-4))."""


class Survivors(NamedTuple):
    """Tokens that may be among the best, and their scores."""

    tokens: Ids
    scores: Heights
    floor: float
    """Tokens below this logit that have no peak of noise are not among them."""


def shortlist(logits: Heights, limit: int, temperature: float, noise: PositionNoise | None) -> Candidates:
    """The best `limit` tokens by score, the best first; of equals, lower ids first.

    `logits`: (V,) float32 of a whole number of ROWS. Tokens of -inf are never candidates. `noise` is None at
    temperature 0, where the score is the logit itself.
    """
    heads = logits.reshape(ROWS, -1).max(axis=0)
    if noise is None:
        floor = _kth(heads, max(limit, _EXACT))
        tokens = _from(logits, floor)
        survivors = Survivors(tokens, logits[tokens], floor)
    else:
        survivors = _noisy(logits, limit, temperature, noise, _from(logits, _kth(heads, limit)))
    return _best(survivors, limit, _tail(logits, survivors.floor, temperature))


def _noisy(logits: Heights, limit: int, temperature: float, noise: PositionNoise, first: Ids) -> Survivors:
    """`first`: tokens with high logits, for a lower bound of the score that counts."""
    peaks = logits[noise.peaks] / temperature + noise.heights
    _, scores = _flat(logits, temperature, noise, first)
    bound = _kth(np.concatenate([scores, peaks]), limit)
    floor = temperature * (bound - PEAK - _SLACK)
    tokens, scores = _flat(logits, temperature, noise, _from(logits, floor))
    return Survivors(np.concatenate([tokens, noise.peaks]), np.concatenate([scores, peaks]), floor)


def _flat(logits: Heights, temperature: float, noise: PositionNoise, tokens: Ids) -> tuple[Ids, Heights]:
    """Those of `tokens` that have no peak, and their scores."""
    heights = noise.at(tokens)
    flat = heights <= PEAK
    return tokens[flat], logits[tokens[flat]] / temperature + heights[flat]


def _from(values: Heights, floor: float) -> Ids:
    """Places of the values that are at least `floor`; never those of -inf."""
    return np.flatnonzero(values >= floor if floor > -np.inf else values > -np.inf)


def _kth(values: Heights, count: int) -> float:
    """The `count`-th largest; -inf if there are fewer."""
    return float(np.partition(values, -count)[-count]) if count <= len(values) else -np.inf


def _tail(logits: Heights, floor: float, temperature: float) -> npt.NDArray[np.float32]:
    """Logarithms of terms whose exponentials add up to about the mass of the tokens below `floor`."""
    stride = 1 if len(logits) <= _WHOLE else _STRIDE
    sample = logits[::stride]
    if temperature == 0:
        return sample[sample < floor] + np.float32(np.log(stride))
    return sample[sample < floor] / temperature + np.float32(np.log(stride * _TAIL_MASS))


def _best(survivors: Survivors, limit: int, tail: npt.NDArray[np.float32]) -> Candidates:
    tokens, scores = survivors.tokens, survivors.scores
    chosen = _from(scores, _kth(scores, limit))
    order = chosen[np.lexsort((tokens[chosen], -scores[chosen]))[:limit]]
    if not len(order):
        return Candidates([], [])
    top = scores[order[0]]
    total = np.exp(scores - top).sum() + np.exp(tail - top).sum()
    return Candidates(tokens[order].tolist(), np.minimum(np.exp(scores[order] - top) / total, 1.0).tolist())
