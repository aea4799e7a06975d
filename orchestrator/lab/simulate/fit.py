"""Fits an acceptance model to a recorded run. Pure arithmetic."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, pstdev

from orchestrator.lab.simulate.acceptance import AcceptanceModel, from_log_odds, to_log_odds
from orchestrator.lab.simulate.trace import Recorded, TracedPosition

_NEWTON_STEPS = 25
_RIDGE = 1.0
"""Pseudo-observations of well-calibrated claims, which stabilise the fit with few positions."""
_MAX_PASSAGE = 16
_EXPONENTS = [0.1 * 1.08**step for step in range(61)]
"""Candidates for r: 0.1 to 10 in steps of 8%."""


def fit(recorded: Sequence[Recorded], independent: float | None = None) -> AcceptanceModel:
    """The model of the positions with known guesses. There must be at least one."""
    runs = [[position for position in one.positions if position.candidates is not None] for one in recorded]
    known = [position for run in runs for position in run]
    slope, shift = _odds_of_claims(known)
    return AcceptanceModel(
        accept=mean(position.rank == 1 for position in known),
        exponent=_exponent(known, slope, shift),
        spread=slope * pstdev(_claimed_odds(position) for position in known),
        passage=_passage(runs),
        # The fit maps claims to acceptance; the model needs the inverse.
        claim_slope=1.0 / slope,
        claim_shift=-shift / slope,
        independent=independent,
    )


def _claimed_odds(position: TracedPosition) -> float:
    assert position.candidates is not None
    return to_log_odds(min(max(position.candidates.probabilities[0], 1e-4), 1.0 - 1e-4))


def _odds_of_claims(known: Sequence[TracedPosition]) -> tuple[float, float]:
    """Slope and shift of log odds of being right by claimed log odds: logistic regression by Newton's method."""
    points = [(_claimed_odds(position), float(position.rank == 1)) for position in known]
    slope, shift = 1.0, 0.0
    for _ in range(_NEWTON_STEPS):
        a, b, c = _RIDGE, 0.0, _RIDGE
        toward_slope, toward_shift = -_RIDGE * (slope - 1.0), -_RIDGE * shift
        for odds, right in points:
            expected = 1.0 / (1.0 + math.exp(-(slope * odds + shift)))
            weight = expected * (1.0 - expected)
            a, b, c = a + weight * odds * odds, b + weight * odds, c + weight
            toward_slope += (right - expected) * odds
            toward_shift += right - expected
        scale = a * c - b * b
        slope += (c * toward_slope - b * toward_shift) / scale
        shift += (a * toward_shift - b * toward_slope) / scale
    return max(slope, 0.05), shift


def _exponent(known: Sequence[TracedPosition], slope: float, shift: float) -> float:
    """The r that maximises the likelihood of the ranks of right guesses that were not the first."""
    missed = [
        (position.rank, len(position.candidates.tokens), from_log_odds(slope * _claimed_odds(position) + shift))
        for position in known
        if position.candidates is not None and position.rank != 1
    ]
    return max(_EXPONENTS, key=lambda exponent: _log_likelihood(missed, exponent))


def _log_likelihood(missed: Sequence[tuple[int | None, int, float]], exponent: float) -> float:
    """Of (rank, number of guesses, probability of the first guess); rank None: no guess was right."""
    law = AcceptanceModel(accept=0.5, exponent=exponent)
    # Two pseudo-observations, so that a run without misses has a maximum.
    total = 0.0
    for rank, count, accept in [*missed, (2, 2, 0.5), (None, 2, 0.5)]:
        chance = law.beyond(count, accept) if rank is None else law.beyond(rank - 1, accept) - law.beyond(rank, accept)
        total += math.log(max(chance, 1e-12) / max(law.beyond(1, accept), 1e-12))
    return total


def _passage(runs: Sequence[Sequence[TracedPosition]]) -> int:
    """The passage length whose correlation of neighbouring claims equals the observed one."""
    pairs = [(_claimed_odds(one), _claimed_odds(next)) for run in runs for one, next in pairwise(run)]
    if len(pairs) < 2:
        return 1
    center = mean(one for one, _ in pairs)
    variance = mean((one - center) ** 2 for one, _ in pairs)
    together = mean((one - center) * (next - center) for one, next in pairs)
    correlation = together / variance if variance > 0 else 0.0
    return max(1, min(_MAX_PASSAGE, round(1.0 / max(1e-3, 1.0 - correlation))))
