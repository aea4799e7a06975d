"""Measures how often guesses with a claimed probability are right. Pure; updated by events."""

import math

_BINS = 16
_SPAN = 6.0
"""Bins cover log odds from -6 to 6."""
_RANKS = 4
"""The first three guesses at a node are measured apart, all further ones together."""
_PRIOR_WEIGHT = 4.0
_DECAY = 0.998


class Calibration:
    """Believed probabilities of guesses by their rank among their siblings and the draft's own claim.

    A draft that is right nine times of ten may claim 0.6, and then its second guess is hardly ever right. Bins are
    equal steps of the log odds; each begins with a few pseudo-observations of the claim.
    """

    def __init__(self) -> None:
        self._trials = [[0.0] * _BINS for _ in range(_RANKS)]
        self._hits = [[0.0] * _BINS for _ in range(_RANKS)]

    def __call__(self, claimed: float, rank: int) -> float:
        """The believed probability, strictly inside (0, 1). Rank 0 is the draft's first guess."""
        row, bin = min(rank, _RANKS - 1), _bin(claimed)
        share = (self._hits[row][bin] + _PRIOR_WEIGHT * claimed) / (self._trials[row][bin] + _PRIOR_WEIGHT)
        return min(max(share, 1e-9), 1.0 - 1e-9)

    def observe(self, claimed: float, rank: int, right: bool) -> None:
        row, bin = min(rank, _RANKS - 1), _bin(claimed)
        self._trials[row][bin] = _DECAY * self._trials[row][bin] + 1.0
        self._hits[row][bin] = _DECAY * self._hits[row][bin] + right


def _bin(claimed: float) -> int:
    inside = min(max(claimed, 1e-9), 1.0 - 1e-9)
    odds = math.log(inside / (1.0 - inside))
    return min(_BINS - 1, max(0, int((odds + _SPAN) / (2 * _SPAN) * _BINS)))
