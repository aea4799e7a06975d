"""Inputs of the state machine. The runtime makes these facts from messages, clocks and processes."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from protocol.messages.base import RequestId, Role
from protocol.messages.sampling import Sampling
from protocol.messages.worker import FromWorker, Hello


@dataclass(frozen=True, slots=True)
class Task:
    """What to continue, and until when."""

    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    eos_tokens: frozenset[int] = frozenset()
    """End-of-request tokens: the first one generated is the last token."""
    draft_tokens: int | None = None
    """K of this request for strategies that verify chains; None for the option's."""
    shared_prefix: int = 0
    """The first tokens that other conversations begin with too; 0 if that is not known."""
    background: bool = False
    """Nobody waits for the answer: the request yields to others."""
    seeded: bool = False
    """Its client chose the seed, and expects the same tokens again."""
    name: str = ""
    """By which its client knows it."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client submits a request. No other request ever had this id."""

    request: RequestId
    task: Task


@dataclass(frozen=True, slots=True)
class Ended:
    """The runtime ends a request: the client cancelled it, or a stop string was found in its text."""

    request: RequestId
    reason: Literal["cancelled", "stop"]
    surplus: int = 0
    """Tokens already emitted that the stop string cut off."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker has loaded its model and can be used."""

    incarnation: int
    hello: Hello
    remote: bool = False
    """The worker runs on another machine."""
    shared_device: bool = False
    """Of a draft: by the hardware, it computes on the target's device."""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker's process is gone."""

    role: Role
    incarnation: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of a worker arrived."""

    role: Role
    incarnation: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The runtime sends one no later than `Machine.deadline()`."""


Event: TypeAlias = Submitted | Ended | WorkerUp | WorkerDown | Arrived | Tick
