"""What happens to the state machine. Plain facts; the shell makes them from messages, clocks and processes."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from protocol.messages.base import Role, SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import FromWorker, Hello


@dataclass(frozen=True, slots=True)
class Request:
    """What to continue, and until when."""

    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    ends: frozenset[int] = frozenset()
    """End-of-sequence tokens: the first one generated is the last token."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client wants this request served under this id, which no other request ever had."""

    sequence: SequenceId
    request: Request


@dataclass(frozen=True, slots=True)
class Ended:
    """The shell ends a request: the client cancelled it, or a stop string was found in its text."""

    sequence: SequenceId
    reason: Literal["cancelled", "stop"]
    surplus: int = 0
    """Tokens already emitted that the stop string cut off."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker has loaded its model and can be used."""

    incarnation: int
    hello: Hello
    guest: bool = False
    """It runs on a machine of somebody else's choice: it may help, and must not forbid anything."""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker's process is gone."""

    role: Role
    incarnation: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker said something."""

    role: Role
    incarnation: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; the shell sends one no later than `Machine.deadline()`."""


Event: TypeAlias = Submitted | Ended | WorkerUp | WorkerDown | Arrived | Tick
