"""Candidates from a vocabulary's logits without a sort, in numpy. Knows no model, no tree and no MLX.

A token's score is logit / T plus Gumbel noise. The best tokens have a high logit or a peak of noise. So noise is added
only to the tokens with a peak and to the tokens whose logit suffices with noise of PEAK. The tokens are those of the
full computation. Their probabilities are estimates: the mass of the tail is estimated from a sample of its tokens.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draft_worker.candidates.noise_prefetch import PEAK, Floats, Ids, PositionNoise
from protocol.speculation.token_tree import Candidates

GROUP_SIZE = 64
"""Tokens of a group. Only the maxima of groups are partitioned. Pad a row of logits with -inf to whole groups."""
_FEW_GROUPS = 64
"""Up to so many groups are searched by themselves; of more, the whole row is."""
_EXACT_LENGTH = 1 << 14
"""Up to this length of a row the mass of the tail is exact."""
_STRIDE = 16
_EXACT_TOKENS = 256
"""Without noise, the mass of at least this many tokens is exact."""
_LEAST = float(np.finfo(np.float32).min)
_SLACK = 1e-3
"""A margin on PEAK against rounding."""
_TAIL_MASS = 3.4372
"""E[exp(g); g <= PEAK] of Gumbel noise g: the exponential integral E1(exp(-4))."""


class Survivors(NamedTuple):
    """Tokens that may be among the best, and their scores."""

    tokens: Ids
    scores: Floats
    floor: float
    """Tokens below this logit and without a peak of noise are left out."""


def shortlist(logits: Floats, limit: int, temperature: float, noise: PositionNoise | None) -> Candidates:
    """The best `limit` tokens by score, the best first; of equals, lower ids first.

    `logits`: (V,) float32, V a multiple of GROUP_SIZE. Tokens of -inf are never candidates. `noise`: None at
    temperature 0, where the score is the logit.
    """
    grouped = _Grouped.of(logits)
    if noise is None:
        floor = _kth(grouped.maxima, max(limit, _EXACT_TOKENS))
        tokens = grouped.at_least(floor)
        survivors = Survivors(tokens, logits[tokens], floor)
    else:
        survivors = _noisy(grouped, limit, temperature, noise)
    return _best(survivors, limit, _tail(logits, survivors.floor, temperature))


class _Grouped(NamedTuple):
    """A row of logits. Token t is of group t mod G."""

    logits: Floats
    maxima: Floats
    """(G,): of the groups."""

    @classmethod
    def of(cls, logits: Floats) -> "_Grouped":
        return cls(logits, logits.reshape(GROUP_SIZE, -1).max(axis=0))

    def at_least(self, floor: float) -> Ids:
        """Tokens, ascending, whose logit is at least `floor`; never of -inf."""
        groups = _at_least(self.maxima, floor)
        if len(groups) > _FEW_GROUPS:
            return _at_least(self.logits, floor)
        rows, columns = np.nonzero(self.logits.reshape(GROUP_SIZE, -1)[:, groups] >= max(floor, _LEAST))
        return rows * len(self.maxima) + groups[columns]


def _noisy(grouped: _Grouped, limit: int, temperature: float, noise: PositionNoise) -> Survivors:
    logits = grouped.logits
    # Tokens with high logits give a lower bound of the `limit`-th best score.
    first = grouped.at_least(_kth(grouped.maxima, limit))
    peak_scores = logits[noise.peaks] / temperature + noise.peak_values
    _, scores = _without_peaks(logits, temperature, noise, first)
    bound = _kth(np.concatenate([scores, peak_scores]), limit)
    floor = temperature * (bound - PEAK - _SLACK)
    tokens, scores = _without_peaks(logits, temperature, noise, grouped.at_least(floor))
    return Survivors(np.concatenate([tokens, noise.peaks]), np.concatenate([scores, peak_scores]), floor)


def _without_peaks(logits: Floats, temperature: float, noise: PositionNoise, tokens: Ids) -> tuple[Ids, Floats]:
    """The `tokens` without a peak, and their scores."""
    values = noise.at(tokens)
    flat = values <= PEAK
    return tokens[flat], logits[tokens[flat]] / temperature + values[flat]


def _at_least(values: Floats, floor: float) -> Ids:
    """Indices of the values that are at least `floor`; never of -inf."""
    return np.flatnonzero(values >= floor if floor > -np.inf else values > -np.inf)


def _kth(values: Floats, count: int) -> float:
    """The `count`-th largest value; -inf if there are fewer values."""
    return float(np.partition(values, -count)[-count]) if count <= len(values) else -np.inf


def _tail(logits: Floats, floor: float, temperature: float) -> npt.NDArray[np.float32]:
    """Numbers whose exponentials sum to about the mass of the tokens below `floor`."""
    stride = 1 if len(logits) <= _EXACT_LENGTH else _STRIDE
    sample = np.ascontiguousarray(logits[::stride])
    if temperature == 0:
        return sample[sample < floor] + np.float32(np.log(stride))
    return sample[sample < floor] / temperature + np.float32(np.log(stride * _TAIL_MASS))


def _best(survivors: Survivors, limit: int, tail: npt.NDArray[np.float32]) -> Candidates:
    tokens, scores = survivors.tokens, survivors.scores
    chosen = _at_least(scores, _kth(scores, limit))
    order = chosen[np.lexsort((tokens[chosen], -scores[chosen]))[:limit]]
    if not len(order):
        return Candidates([], [])
    top = scores[order[0]]
    total = np.exp(scores - top).sum() + np.exp(tail - top).sum()
    return Candidates(tokens[order].tolist(), np.minimum(np.exp(scores[order] - top) / total, 1.0).tolist())
