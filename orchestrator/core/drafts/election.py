"""Which of several drafts drafts, who is tried out beside it, and who stands by. Pure.

Whoever wins, the tokens are the same.
"""

import math
from dataclasses import dataclass
from typing import Literal

MOST_DRAFTS = 16
_GAIN = 1.05
"""A newcomer must promise this much more: a trial flatters whoever is on it, since it goes on growing while the one
that drafts pays for its own misses."""
_FIRST_PAUSE = 256
_LONGEST_PAUSE = 8192
"""Rounds until one that was not chosen is tried again: texts and links change. Each time twice as many."""

DraftStatus = Literal["drafting", "on trial", "standing by"]


@dataclass(slots=True)
class _Candidate:
    rating: float | None = None
    """Speed with it, relative to the others' ratings; 0 for one that failed, None until it is known."""
    due: int = 0
    """The round from which it may be tried."""
    pause: int = _FIRST_PAUSE

    @property
    def worth(self) -> tuple[int, float]:
        """Known to be of use, then unknown, then known to have failed."""
        if self.rating is None:
            return 1, 0.0
        return (2, self.rating) if self.rating > 0.0 else (0, 0.0)


class Election:
    """Drafts are named by their incarnations. One that comes first drafts at once; any later one is tried out
    beside it first, so that a bad one never gets in the way."""

    def __init__(self) -> None:
        self.drafting: int | None = None
        self.on_trial: int | None = None
        self._candidates: dict[int, _Candidate] = {}
        """In order of arrival."""
        self._rounds = 0
        self._promise: float | None = None
        """What the one that drafts promised on its own trial, while its predecessor is tried out beside it in turn."""

    @property
    def full(self) -> bool:
        return len(self._candidates) >= MOST_DRAFTS

    @property
    def contested(self) -> bool:
        """Another one waits to be tried out."""
        return self._next() is not None

    def standings(self) -> dict[int, DraftStatus]:
        return {id: self._standing(id) for id in self._candidates}

    def joined(self, id: int) -> None:
        self._candidates[id] = _Candidate(due=self._rounds)
        if self.drafting is None:
            self._appoint(id)
        self._try_next()

    def left(self, id: int) -> None:
        """It died, fell silent to the shell, or was revoked."""
        self._candidates.pop(id, None)
        if id in (self.drafting, self.on_trial):
            self._promise = None
        if self.on_trial == id:
            self.on_trial = None
        if self.drafting == id:
            self._succeed()
        self._try_next()

    def failed(self) -> bool:
        """The one that drafts is silent or grows what the target can't take: whether another one took over."""
        assert self.drafting is not None
        failed = self._candidates[self.drafting]
        rivals = (candidate for candidate in self._candidates.values() if candidate is not failed)
        if not any(candidate.worth > (0, 0.0) for candidate in rivals):
            return False
        failed.rating = 0.0
        self._promise = None
        self._put_off(failed)
        self._succeed()
        self._try_next()
        return True

    def round_over(self) -> None:
        """A sequence has moved on."""
        self._rounds += 1
        self._try_next()

    def judged(self, ratio: float) -> None:
        """The trial is over: with the newcomer decoding is `ratio` times as fast as with the one that drafts."""
        assert self.drafting is not None
        assert self.on_trial is not None
        incumbent, newcomer = self._candidates[self.drafting], self._candidates[self.on_trial]
        if self._promise is not None:
            # Both were flattered alike, so that their quotient tells who is better.
            ratio = math.sqrt(ratio / self._promise)
            self._promise = None
            change = ratio > 1.0
        else:
            change = ratio > _GAIN
            self._promise = ratio if change else None
        newcomer.rating = ratio * (incumbent.rating or 1.0)
        if change:
            self.drafting, self.on_trial = self.on_trial, self.drafting
        if self._promise is None:
            self._put_off(incumbent if change else newcomer)
            self.on_trial = None
            self._try_next()

    def _standing(self, id: int) -> DraftStatus:
        if id == self.drafting:
            return "drafting"
        return "on trial" if id == self.on_trial else "standing by"

    def _succeed(self) -> None:
        """The best of those that remain drafts; the first to come among equals."""
        others = [id for id in self._candidates if id != self.drafting]
        self.drafting = None
        if others:
            self._appoint(max(others, key=lambda id: self._candidates[id].worth))

    def _appoint(self, id: int) -> None:
        self.drafting = id
        if self.on_trial == id:
            self.on_trial = None
        chosen = self._candidates[id]
        chosen.rating = chosen.rating or 1.0

    def _put_off(self, candidate: _Candidate) -> None:
        candidate.due = self._rounds + candidate.pause
        candidate.pause = min(2 * candidate.pause, _LONGEST_PAUSE)

    def _try_next(self) -> None:
        if self.on_trial is None and self.drafting is not None:
            self.on_trial = self._next()

    def _next(self) -> int | None:
        """The one that has been due for longest."""
        waiting = [id for id in self._candidates if id not in (self.drafting, self.on_trial)]
        due = [id for id in waiting if self._candidates[id].due <= self._rounds]
        return min(due, key=lambda id: self._candidates[id].due, default=None)
