"""What the state machine wants done, in this order."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from protocol.messages.base import Role, SequenceId
from protocol.messages.client import Statistics
from protocol.messages.sampling import Likelihood
from protocol.messages.worker import ToWorker


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to the present worker of a role; of several drafts, to this incarnation."""

    role: Role
    message: ToWorker
    incarnation: int | None = None
    """Always given for a draft."""


@dataclass(frozen=True, slots=True)
class Emit:
    """These tokens are committed for good: hand them to the client."""

    sequence: SequenceId
    tokens: tuple[int, ...]
    hit: bool | None = None
    """Whether the next speculation was there already; None where there is no such thing."""
    likelihoods: tuple[Likelihood, ...] = ()
    """Of each of the tokens, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is complete."""

    sequence: SequenceId
    reason: Literal["stop", "length", "cancelled"]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Reject:
    """The request can't be served; the text says why and what to do."""

    sequence: SequenceId
    text: str


@dataclass(frozen=True, slots=True)
class Replace:
    """A worker answers no more although its process lives: kill it and start another."""

    role: Role
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """A worker can't serve here and another start would not help; the text says why and what to do."""

    role: Role
    incarnation: int
    text: str


@dataclass(frozen=True, slots=True)
class Release:
    """This arena is of no more use: unlink it."""

    name: str


Command: TypeAlias = SendMessage | Emit | Finish | Reject | Replace | Dismiss | Release
