"""Which of several drafts is active, which one is on trial beside it, and which ones stand by. Pure.

The outcome changes speed, never tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

MAX_DRAFTS = 16
_GAIN = 1.05
"""A draft on trial must be this much faster to become active. A trial flatters the draft on trial: it goes on growing
while the active one pays for its own misses."""
_FIRST_PAUSE = 256
_LONGEST_PAUSE = 8192
"""Rounds until a draft that lost a trial gets the next one, because texts and links change; doubled each time."""

DraftStatus = Literal["active", "on trial", "standby"]


@dataclass(slots=True)
class _Candidate:
    rating: float | None = None
    """Decoding speed with this draft, relative to the others' ratings; 0 after a failure, None until it is known."""
    due: int = 0
    """The round from which it may be tried."""
    pause: int = _FIRST_PAUSE

    @property
    def rank(self) -> tuple[int, float]:
        """Known to be of use, then unknown, then failed."""
        if self.rating is None:
            return 1, 0.0
        return (2, self.rating) if self.rating > 0.0 else (0, 0.0)


class Election:
    """Drafts are named by their incarnations.

    The first draft becomes active at once. Any later one is tried beside it first, so that a bad draft never slows
    decoding down.
    """

    def __init__(self) -> None:
        self.active: int | None = None
        self.on_trial: int | None = None
        self._candidates: dict[int, _Candidate] = {}
        """In order of arrival."""
        self._rounds = 0
        self._first_ratio: float | None = None
        """The ratio by which the active draft won its trial, while its predecessor is tried beside it in turn."""

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
        self._candidates[id] = _Candidate(due=self._rounds)
        if self.active is None:
            self._appoint(id)
        self._begin_trial()

    def draft_down(self, id: int) -> None:
        """A draft died, was given up, or was revoked."""
        self._candidates.pop(id, None)
        if id in (self.active, self.on_trial):
            self._first_ratio = None
        if self.on_trial == id:
            self.on_trial = None
        if self.active == id:
            self._succeed()
        self._begin_trial()

    def active_failed(self) -> bool:
        """The active draft is silent, or grows what the target refuses. Returns whether another one replaced it."""
        assert self.active is not None
        failed = self._candidates[self.active]
        others = (candidate for candidate in self._candidates.values() if candidate is not failed)
        if not any(candidate.rank > (0, 0.0) for candidate in others):
            return False
        failed.rating = 0.0
        self._first_ratio = None
        self._put_off(failed)
        self._succeed()
        self._begin_trial()
        return True

    def round_over(self) -> None:
        """A sequence has moved on."""
        self._rounds += 1
        self._begin_trial()

    def trial_over(self, ratio: float) -> None:
        """With the draft on trial, decoding is `ratio` times as fast as with the active one."""
        assert self.active is not None
        assert self.on_trial is not None
        incumbent, challenger = self._candidates[self.active], self._candidates[self.on_trial]
        if self._first_ratio is not None:
            # Both trials flattered the draft on trial alike, so that their quotient tells which one is better.
            ratio = math.sqrt(ratio / self._first_ratio)
            self._first_ratio = None
            change = ratio > 1.0
        else:
            change = ratio > _GAIN
            self._first_ratio = ratio if change else None
        challenger.rating = ratio * (incumbent.rating or 1.0)
        if change:
            self.active, self.on_trial = self.on_trial, self.active
        if self._first_ratio is None:
            self._put_off(incumbent if change else challenger)
            self.on_trial = None
            self._begin_trial()

    def _status(self, id: int) -> DraftStatus:
        if id == self.active:
            return "active"
        return "on trial" if id == self.on_trial else "standby"

    def _succeed(self) -> None:
        """The best of the other drafts becomes active; the first to arrive among equals."""
        others = [id for id in self._candidates if id != self.active]
        self.active = None
        if others:
            self._appoint(max(others, key=lambda id: self._candidates[id].rank))

    def _appoint(self, id: int) -> None:
        self.active = id
        if self.on_trial == id:
            self.on_trial = None
        appointed = self._candidates[id]
        appointed.rating = appointed.rating or 1.0

    def _put_off(self, candidate: _Candidate) -> None:
        candidate.due = self._rounds + candidate.pause
        candidate.pause = min(2 * candidate.pause, _LONGEST_PAUSE)

    def _begin_trial(self) -> None:
        if self.on_trial is None and self.active is not None:
            self.on_trial = self._next()

    def _next(self) -> int | None:
        """The draft whose trial has been due for longest."""
        waiting = [id for id in self._candidates if id not in (self.active, self.on_trial)]
        due = [id for id in waiting if self._candidates[id].due <= self._rounds]
        return min(due, key=lambda id: self._candidates[id].due, default=None)
