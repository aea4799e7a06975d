"""One draft that is up: what it serves, what it holds of conversations, and whether reading a prompt pays. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.core.drafts.history import DraftHistory
from orchestrator.core.estimates import Estimates
from orchestrator.core.expected_rate import best_counts
from orchestrator.core.request import Request
from orchestrator.core.tuning import TUNING
from protocol.common_prefix import common_prefix
from protocol.messages.base import RequestId
from protocol.messages.worker import Hello
from protocol.speculation.rolling_context import RollingContext

_MAX_KNOWN = 8


@dataclass(slots=True)
class _Conversation:
    tokens: Sequence[int]
    held: int
    """Of these tokens, the first whose KV the draft holds."""


class Earlier(NamedTuple):
    """Of what a prompt continues."""

    held: int = 0
    """Its first tokens whose KV the draft is expected to hold."""
    continues: bool = False
    """It is a later turn of a known conversation."""


class Conversations:
    """The last ended conversations, for one life of one draft."""

    def __init__(self) -> None:
        self._known: deque[_Conversation] = deque(maxlen=_MAX_KNOWN)
        self._expected: dict[RequestId, int] = {}
        """Tokens that the draft was expected to hold, of the requests that it reads."""
        self.trusted = True
        """The draft held what it was expected to, last time."""

    def earlier(self, tokens: Sequence[int]) -> Earlier:
        """What is known of the conversation that the prompt `tokens` continues."""
        shared = [(common_prefix(each.tokens, tokens), each) for each in self._known]
        held = max((min(length, each.held) for length, each in shared), default=0)
        # A client may tell an answer again in other tokens: most of them have to be the same.
        continues = any(2 * length > len(each.tokens) for length, each in shared)
        return Earlier(held if self.trusted else 0, continues)

    def begun(self, request: RequestId, held: int) -> None:
        """The draft was sent a request of whose tokens it is expected to hold `held`."""
        self._expected[request] = held

    def held(self, request: RequestId, tokens: int) -> None:
        """The draft held `tokens` tokens of a request that was sent to it."""
        expected = self._expected.pop(request, None)
        if expected is not None and (expected or tokens):
            self.trusted = 2 * tokens >= expected

    def grown(self, request: RequestId) -> None:
        """The draft has read the request. If it held any of it, it has said so."""
        if request in self._expected:
            self.held(request, 0)

    def ended(self, request: RequestId, tokens: Sequence[int], held: int) -> None:
        """A request with these tokens has ended; it replaces the conversation that it continued."""
        self._expected.pop(request, None)
        others = (each for each in self._known if common_prefix(each.tokens, tokens) < len(each.tokens))
        self._known = deque((*others, _Conversation(tuple(tokens), held)), maxlen=_MAX_KNOWN)


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
    if sharing == 1 and (saved := estimates.saved_by_asking) is not None:
        gain = saved * request.remaining / (estimates.usual_rate * plain) + TUNING.explored * estimates.unasked * plain
    else:
        gain = _gain_of_turns(estimates, sharing) * request.remaining * plain
    return TUNING.certain_gain * reading > gain


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
