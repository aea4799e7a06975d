"""What the runtime must do after an event of the state machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from protocol.messages.base import RequestId, Role
from protocol.messages.client import Statistics
from protocol.messages.sampling import TokenLogprob
from protocol.messages.worker import ToWorker


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to the present worker of a role, or to the draft with this incarnation."""

    role: Role
    message: ToWorker
    incarnation: int | None = None
    """Always given for a draft."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Send these committed tokens to the client."""

    request: RequestId
    tokens: tuple[int, ...]
    hit: bool | None = None
    """Whether the round is a hit; None under a strategy without a speculation cache."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, if the request asked for log-probabilities."""
    prompt_token_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the next tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class TellReading:
    """Tell the client how far the target has read its prompt."""

    request: RequestId
    tokens: int
    """Tokens that have KV."""
    total: int
    queued: int = 0
    """As of Reading."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is complete."""

    request: RequestId
    reason: Literal["stop", "length", "cancelled"]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Reject:
    """The request can't be served. The text says why and what to do."""

    request: RequestId
    text: str


@dataclass(frozen=True, slots=True)
class Replace:
    """A worker does not answer although its process lives: kill the process and start another one."""

    role: Role
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pardon:
    """Two targets ended over a request, which was rejected, or an arena, which was released: these deaths don't
    count."""


@dataclass(frozen=True, slots=True)
class Dismiss:
    """A worker can't serve here, and a restart would not help. The text says why and what to do."""

    role: Role
    incarnation: int
    text: str


@dataclass(frozen=True, slots=True)
class Release:
    """Unlink this arena."""

    name: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where the workers compute from now on: draft and target on one device, in turns, or apart, at the same time."""

    shared_device: bool


@dataclass(frozen=True, slots=True)
class TrialDecided:
    """Two drafts were compared, and it is decided which one is active. Both go on; the runtime may end the loser."""

    winner: int
    loser: int
    """Incarnations."""
    winner_rate: float
    loser_rate: float
    """Expected tokens a second, each measured while the other draft rested. Of a loser that was never active, by what
    the target would have accepted of its trees while both grew."""


Command: TypeAlias = (
    SendMessage | Emit | TellReading | Finish | Reject | Replace | Pardon | Dismiss | Release | Place | TrialDecided
)


@dataclass(frozen=True, slots=True)
class Ready:
    """What the runtime must do after an event: `first` at once, and then what `then()` returns, each in its order.

    After a verdict the target's next round is in `first`, and does not wait until the rest is computed. `then` is to be
    called once, before the next event.
    """

    first: list[Command]
    then: Callable[[], list[Command]] = list

    def all(self) -> list[Command]:
        """Everything, where nobody waits for the first part."""
        return [*self.first, *self.then()]
