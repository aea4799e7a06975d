"""What a draft holds of earlier conversations. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.common_prefix import common_prefix
from protocol.messages.base import RequestId

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
