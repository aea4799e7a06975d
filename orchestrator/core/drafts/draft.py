"""One draft that is up: what it serves, what it holds of conversations, and whether reading a prompt pays. Pure."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.core.drafts.conversations import Conversations, Earlier
from orchestrator.core.drafts.history import DraftHistory
from orchestrator.core.estimates import Estimates
from orchestrator.core.expected_rate import best_counts
from orchestrator.core.request import Request
from orchestrator.core.tuning import TUNING
from protocol.messages.base import RequestId
from protocol.messages.worker import Hello
from protocol.speculation.rolling_context import RollingContext


class CatchingUp(NamedTuple):
    """A conversation that a draft reads after the end of a turn."""

    request: RequestId
    tokens: list[int]
    held: int
    """Tokens that it is expected to have held at the beginning."""
    began: float
    estimates: Estimates

    def expected(self, now: float) -> int:
        """Tokens that it is expected to hold by now."""
        seconds = self.estimates.prefill.get(math.inf)
        return min(len(self.tokens), self.held + int((now - self.began) / seconds))


@dataclass(slots=True)
class Draft:
    """`hello` is its own; `history` outlives it."""

    hello: Hello
    history: DraftHistory
    started: dict[RequestId, int] = field(default_factory=dict)
    """Requests that the draft serves, each with the round of its Start."""
    conversations: Conversations = field(default_factory=Conversations)
    catching_up: "CatchingUp | None" = None
    _earlier: dict[RequestId, Earlier] = field(default_factory=dict)
    """Of the live requests that it was to serve."""
    _late_since: float | None = None
    """Since when the draft owes growth; None if it owes none."""

    def reads(self, tokens: int) -> int:
        """How many of so many tokens of a conversation it sees."""
        return tokens - RollingContext(self.hello.context).skipped(tokens)

    def stop(self, request: RequestId) -> bool:
        """Returns whether the draft served the request."""
        self._late_since = None
        return self.started.pop(request, None) is not None

    def owes_growth(self, now: float) -> None:
        """A round missed, or the draft rested and was asked for a step."""
        if self._late_since is None:
            self._late_since = now

    def earlier(self, request: Request) -> Earlier:
        """Of the conversation that the request continues."""
        known = self._earlier.get(request.id)
        if known is None:
            known = self._earlier[request.id] = self.conversations.earlier(self.seen(request))
        return known

    def remember(self, request: Request) -> None:
        """The request has ended: what the next one that continues it will find."""
        earlier, seen = self._earlier.pop(request.id, None), self.seen(request)
        if earlier is not None:
            self.conversations.ended(request.id, seen, len(seen) if request.id in self.started else earlier.held)

    def seen(self, request: Request) -> list[int]:
        """The tokens that it sees of those before the root."""
        return RollingContext(self.hello.context).seen(request.tokens[:-1])

    def has_grown(self, request: RequestId) -> None:
        self._late_since = None
        self.conversations.grown(request)

    def silent(self, estimates: Estimates, reading: bool, now: float) -> bool:
        """The draft has owed growth for too long. `reading`: it reads the prompt of a request."""
        if self._late_since is None:
            return False
        limit = TUNING.draft_prefill_wait if reading else estimates.growth_timeout
        return now - self._late_since > limit


def too_short(request: Request, draft: Draft, estimates: Estimates, sharing: int) -> bool:
    """Whether the answer can't gain what it costs that the target waits while the draft reads what it does not hold of
    the prompt.

    A token costs each of the `sharing` requests its part of a forward over all of them.
    """
    if not (estimates.turns.in_turns and estimates.target.known):
        return False
    missing = max(0, draft.reads(len(request.tokens)) - draft.earlier(request).held)
    reading = missing * estimates.prefill.get(0.0)
    plain = estimates.target(sharing) / sharing
    return TUNING.certain_gain * reading > _gain_of_turns(estimates, sharing) * request.remaining * plain


def _gain_of_turns(estimates: Estimates, sharing: int) -> float:
    """What drafting in turns is expected to save of the time of plain decoding.

    Several requests share a forward already, and with their guesses it gets wide. So theirs follows from the expected
    rate after one growth step for all of them.
    """
    if not estimates.first_response.count:
        return TUNING.turns_gain
    cost, hop, shares = estimates.target, estimates.hop.get(0.0), estimates.ranks.shares(TUNING.step_guesses)
    plain = sharing / (cost(sharing) + hop)
    gain = 1.0 - plain / best_counts([shares] * sharing, cost, hop + estimates.first_response.get(0.0))[1].rate
    return max(TUNING.least_turns_gain, gain)
