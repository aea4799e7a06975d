"""Which of several drafts is active, which one is on trial beside it, and which ones are standbys. Pure.

The outcome changes speed, never tokens.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_DRAFTS = 16
_PLAUSIBLE = 0.7
"""By its tree, a draft on trial must be this fast relative to the active one to be measured alone. The trial may favour
either: both grow, one of them perhaps on the target's device, and only the active draft pays for its own misses."""
_GAIN = 1.05
"""Measured alone, it must be this much faster to become active: rates over 48 rounds of the same draft vary by 7%."""
_FIRST_PAUSE = 256
_LONGEST_PAUSE = 8192
"""Rounds until a draft that lost a trial gets the next one, since texts and links change. Doubled after each loss."""

DraftStatus = Literal["active", "on trial", "standby"]


class Decision(NamedTuple):
    """The end of the comparison of two drafts."""

    winner: int
    loser: int
    ratio: float
    """Decoding speed with the winner relative to the loser. Below 1 if the loser was faster, but not by 5%."""


@dataclass(slots=True)
class _Candidate:
    rating: float | None = None
    """Decoding speed with this draft, relative to the others' ratings; 0 after a failure, None until it is known."""
    trial_from: int = 0
    """The round from which it may be on trial."""
    pause: int = _FIRST_PAUSE

    @property
    def rank(self) -> tuple[int, float]:
        """Rated drafts before unrated ones, and those before failed ones."""
        if self.rating is None:
            return 1, 0.0
        return (2, self.rating) if self.rating > 0.0 else (0, 0.0)


class Election:
    """Drafts are identified by their incarnations.

    The first draft becomes active at once. Any later draft is on trial first, so that a bad draft never slows decoding
    down. If it may be the better one, each of the two is active in turn while the other one rests, the later one first.
    """

    def __init__(self) -> None:
        self.active: int | None = None
        self.on_trial: int | None = None
        self._candidates: dict[int, _Candidate] = {}
        """In the order in which they came up."""
        self._rounds = 0
        self.alone = False
        """The active draft is measured alone: the one on trial rests."""

    @property
    def full(self) -> bool:
        return len(self._candidates) >= MAX_DRAFTS

    @property
    def contested(self) -> bool:
        """Another draft waits for its trial."""
        return self._next() is not None

    def statuses(self) -> dict[int, DraftStatus]:
        return {id: self._status(id) for id in self._candidates}

    def draft_up(self, id: int) -> None:
        self._candidates[id] = _Candidate(trial_from=self._rounds)
        if self.active is None:
            self._activate(id)
        self._begin_trial()

    def draft_down(self, id: int) -> None:
        """A draft's process ended, or the draft was detached or revoked."""
        self._candidates.pop(id, None)
        if id in (self.active, self.on_trial):
            self.alone = False
        if self.on_trial == id:
            self.on_trial = None
        if self.active == id:
            self._activate_best()
        self._begin_trial()

    def active_failed(self) -> bool:
        """The active draft is silent, or the target refuses its growth. Returns whether another draft became active."""
        assert self.active is not None
        failed = self._candidates[self.active]
        others = (candidate for candidate in self._candidates.values() if candidate is not failed)
        if not any(candidate.rank > (0, 0.0) for candidate in others):
            return False
        failed.rating = 0.0
        self.alone = False
        self._postpone_trial(failed)
        self._activate_best()
        self._begin_trial()
        return True

    def round_committed(self) -> None:
        """A sequence has committed a round."""
        self._rounds += 1
        self._begin_trial()

    def trial_ended(self, ratio: float) -> Decision | None:
        """By its tree, decoding with the draft on trial would be `ratio` times as fast as with the active one.

        Returns the decision, or None if both are measured alone from now on, first the one that was on trial.
        """
        if ratio < _PLAUSIBLE:
            return self._decide(ratio)
        incumbent, challenger = self._pair()
        challenger.rating = ratio * (incumbent.rating or 1.0)
        self.alone = True
        self.change_places()
        return None

    def change_places(self) -> None:
        """The draft on trial becomes active, and the active one is on trial."""
        self.active, self.on_trial = self.on_trial, self.active

    def measured_alone(self, ratio: float) -> Decision:
        """The incumbent, which is active again, was measured too: with the other draft decoding is `ratio` times as
        fast."""
        self.alone = False
        return self._decide(ratio)

    def _decide(self, ratio: float) -> Decision:
        incumbent, challenger = self._pair()
        challenger.rating = ratio * (incumbent.rating or 1.0)
        change = ratio > _GAIN
        if change:
            self.change_places()
        self._postpone_trial(incumbent if change else challenger)
        assert self.active is not None
        assert self.on_trial is not None
        decision = Decision(self.active, self.on_trial, ratio if change else 1.0 / max(1e-9, ratio))
        self.on_trial = None
        self._begin_trial()
        return decision

    def _pair(self) -> tuple[_Candidate, _Candidate]:
        """The active draft and the one on trial; both must exist."""
        assert self.active is not None
        assert self.on_trial is not None
        return self._candidates[self.active], self._candidates[self.on_trial]

    def _status(self, id: int) -> DraftStatus:
        if id == self.active:
            return "active"
        return "on trial" if id == self.on_trial else "standby"

    def _activate_best(self) -> None:
        """The best of the other drafts becomes active; of equal ones the first that came up."""
        others = [id for id in self._candidates if id != self.active]
        self.active = None
        if others:
            self._activate(max(others, key=lambda id: self._candidates[id].rank))

    def _activate(self, id: int) -> None:
        self.active = id
        if self.on_trial == id:
            self.on_trial = None
        activated = self._candidates[id]
        activated.rating = activated.rating or 1.0

    def _postpone_trial(self, candidate: _Candidate) -> None:
        candidate.trial_from = self._rounds + candidate.pause
        candidate.pause = min(2 * candidate.pause, _LONGEST_PAUSE)

    def _begin_trial(self) -> None:
        if self.on_trial is None and self.active is not None:
            self.on_trial = self._next()

    def _next(self) -> int | None:
        """The draft whose trial has been due for longest; None if none is due."""
        standbys = [id for id in self._candidates if id not in (self.active, self.on_trial)]
        due = [id for id in standbys if self._candidates[id].trial_from <= self._rounds]
        return min(due, key=lambda id: self._candidates[id].trial_from, default=None)
