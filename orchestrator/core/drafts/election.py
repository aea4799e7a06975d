"""Which of several drafts is active, which one is on trial beside it, and which ones are standbys. Pure.

The outcome changes speed, never tokens.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from orchestrator.core.commands import TrialDecided
from orchestrator.core.estimates import Tries
from orchestrator.core.request import Request
from orchestrator.core.speculation import Speculation
from orchestrator.core.tuning import TUNING
from orchestrator.core.workers import MAX_DRAFTS
from protocol.messages.base import NodeId, RequestId
from protocol.speculation.token_tree import node_id

DraftStatus = Literal["active", "on trial", "standby"]


@dataclass(slots=True)
class _Candidate:
    rating: float | None = None
    """Decoding speed with this draft, relative to the others' ratings; 0 after a failure, None until it is known."""
    trial: int = 0
    """Number of its last trial; 0 before the first one."""

    @property
    def rank(self) -> tuple[int, float]:
        """Rated drafts before unrated ones, and those before failed ones."""
        if self.rating is None:
            return 1, 0.0
        return (2, self.rating) if self.rating > 0.0 else (0, 0.0)


@dataclass(slots=True)
class TrialRequest:
    """One request, as it would continue with the draft on trial."""

    speculation: Speculation
    compared: bool
    """Its rounds count. A draft that came up in the middle of a request prefills first, which must not count."""
    ready: frozenset[NodeId] | None = None
    """What it would have sent of its tree in the present round."""


class Trial:
    """A draft on trial, and what its trees would have given while it grows beside the active one.

    When it becomes active, its trees are used at once.
    """

    def __init__(self, incarnation: int, requests: dict[RequestId, TrialRequest] | None = None) -> None:
        """`requests`: what the draft has grown already."""
        self.incarnation = incarnation
        self.requests = requests or {}
        self.rounds = 0
        self._compared = 0
        self._tokens, self._trial_tokens, self._seconds = 0, 0, 0.0

    @property
    def share(self) -> float | None:
        """Of the tokens of the active draft's rounds, those that these trees would have given; None until known."""
        return self._trial_tokens / self._tokens if self._compared >= TUNING.tree_rounds else None

    @property
    def active_rate(self) -> float:
        """Tokens a second with the active draft."""
        return self._tokens / max(1e-9, self._seconds)

    def round_sent(self, request: Request) -> None:
        """The target was sent a tree of the active draft; the one on trial would have sent as many nodes."""
        trial = self.requests.get(request.id)
        if trial is not None and trial.compared and request.outstanding is not None:
            nodes = islice(trial.speculation.tree.best(), len(request.outstanding.tokens) - 1)
            trial.ready = frozenset(node.id for node in nodes)

    def follow(self, request: Request, tokens: list[int], seconds: float, now: float) -> bool:
        """A round of `seconds` has committed `tokens`. Returns whether it is a hit for the draft on trial."""
        trial = self.requests[request.id]
        self.rounds += 1
        if trial.ready is not None:
            end, accepted = trial.speculation.tree.root.id, 0
            for token in tokens[:-1]:
                end = node_id(end, token)
                if end not in trial.ready:
                    break
                accepted += 1
            self._compared += 1
            self._tokens += len(tokens)
            self._trial_tokens += accepted + 1
            self._seconds += seconds
            trial.ready = None
        return trial.speculation.commit(tokens, request.round, now)


@dataclass(slots=True)
class Election:
    """Drafts are identified by their incarnations.

    The first draft becomes active at once. Any later draft is on trial first: it grows beside the active one, so that
    a bad draft never slows decoding down. If its trees are of any use, it rests until the active draft has been
    measured, and then is active for some rounds itself, while the other one rests.
    """

    active: int | None = None
    on_trial: int | None = None
    alone: bool = False
    """The active draft is measured alone: the one on trial rests."""
    _candidates: dict[int, _Candidate] = field(default_factory=dict)
    """In the order in which they came up."""
    _tries: Tries = field(default_factory=lambda: Tries(TUNING.drafts))
    _trials: int = 0

    @property
    def full(self) -> bool:
        return len(self._candidates) >= MAX_DRAFTS

    def statuses(self) -> dict[int, DraftStatus]:
        return {id: self._status(id) for id in self._candidates}

    def draft_up(self, id: int) -> None:
        self._candidates[id] = _Candidate()
        if self.active is None:
            self._activate(id)
        self._begin_trial()

    def draft_down(self, id: int) -> None:
        """A draft's process ended, or the draft was detached or revoked."""
        self._candidates.pop(id, None)
        if id == self.active:
            self._activate_best()
        elif id == self.on_trial:
            self.on_trial, self.alone = None, False
            self._tries.restart()
        self._begin_trial()

    def active_failed(self) -> bool:
        """The active draft is silent, or the target refuses its growth. Returns whether another draft became active."""
        assert self.active is not None
        failed = self._candidates[self.active]
        others = (candidate for candidate in self._candidates.values() if candidate is not failed)
        if not any(candidate.rank > (0, 0.0) for candidate in others):
            return False
        failed.rating, failed.trial = 0.0, self._number()
        self._activate_best()
        self._begin_trial()
        return True

    def round_ended(
        self, tokens: float, seconds: float, kind: Hashable, trial: Trial | None = None, ready: bool = True
    ) -> TrialDecided | None:
        """A round has ended with the active draft. Returns the decision, if this round led to one.

        `tokens`: expected of the round. `kind`: as `Tries` has it. `trial`: of the draft on trial, which is `ready` if
        it has read what it serves.
        """
        decided = None
        if trial is None or self.alone:
            outcome = self._tries.observe(tokens, seconds, kind)
            if outcome is not None:
                if not outcome.kept:
                    self._change_places()
                decided = self._decide(outcome.usual, outcome.tried, outcome.kept)
            elif self.alone and ready and not self._tries.trying and self._tries.measured(kind):
                self._tries.begin()
                self._change_places()
        elif trial.share is not None:
            if trial.share < TUNING.plausible:
                self._tries.failed()
                decided = self._decide(trial.active_rate, trial.active_rate * trial.share, False)
            else:
                self.alone = True
        elif trial.rounds >= TUNING.trial_patience and self._next() is not None:
            self._end_trial()
        self._begin_trial()
        return decided

    def _change_places(self) -> None:
        """The draft on trial becomes active, and the active one is on trial."""
        self.active, self.on_trial = self.on_trial, self.active

    def _decide(self, usual: float, tried: float, kept: bool) -> TrialDecided:
        """The trial has ended; the better draft is active."""
        assert self.active is not None
        assert self.on_trial is not None
        winner, loser = self.active, self.on_trial
        ratio = tried / max(1e-9, usual)
        one, other = self._candidates[winner], self._candidates[loser]
        if kept:
            one.rating = ratio * (other.rating or 1.0)
        else:
            other.rating = ratio * (one.rating or 1.0)
        self._end_trial()
        rates = (tried, usual) if kept else (usual, tried)
        return TrialDecided(winner, loser, *rates)

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
        self.active, self.alone = id, False
        if self.on_trial == id:
            self.on_trial = None
        activated = self._candidates[id]
        activated.rating = activated.rating or 1.0
        self._tries.restart()

    def _begin_trial(self) -> None:
        if self.on_trial is None and self.active is not None:
            self.on_trial = self._next()

    def _end_trial(self) -> None:
        assert self.on_trial is not None
        self._candidates[self.on_trial].trial = self._number()
        self.on_trial, self.alone = None, False

    def _number(self) -> int:
        self._trials += 1
        return self._trials

    def _next(self) -> int | None:
        """The draft that waits for its trial, a new one first; None if none is due."""
        standbys = {id: each for id, each in self._candidates.items() if id not in (self.active, self.on_trial)}
        due = [id for id, candidate in standbys.items() if not candidate.trial or self._tries.due]
        return min(due, key=lambda id: standbys[id].trial, default=None)
