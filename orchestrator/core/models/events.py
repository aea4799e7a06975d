"""What happens to a table of models, and what its shell must then do."""

from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

ModelName = NewType("ModelName", str)
Ticket = NewType("Ticket", int)
"""One request for a model; never used twice."""
Seconds = float


@dataclass(frozen=True)
class ModelEntry:
    """One model of the table."""

    name: ModelName
    bytes: int
    """Memory that the model takes while it is loaded, drafts and KV included."""
    pinned: bool = False
    """Loaded at the start, and never unloaded for another one or for being idle."""
    kv_for: str = ""
    """The requests whose KV counts in `bytes`, for users."""

    @property
    def need(self) -> str:
        """The memory, for users."""
        return gib(self.bytes) + (self.kv_for and f" with KV of {self.kv_for}")


@dataclass(frozen=True)
class ServerStarted:
    """The server listens: pinned models are loaded."""


@dataclass(frozen=True)
class Requested:
    """A request names a model."""

    ticket: Ticket
    model: ModelName


@dataclass(frozen=True)
class Released:
    """A request has ended, or its client has gone, whether it was admitted or still waits."""

    ticket: Ticket


@dataclass(frozen=True)
class KeepChosen:
    """How long this model stays loaded without a request, until it is unloaded; None for ever. Without effect on a
    model that is not loaded."""

    model: ModelName
    seconds: Seconds | None


@dataclass(frozen=True)
class ModelLoaded:
    model: ModelName


@dataclass(frozen=True)
class LoadFailed:
    """A model could not be loaded. Its memory is free."""

    model: ModelName
    reason: str


@dataclass(frozen=True)
class ModelEnded:
    """The pipeline of a loaded model has ended by itself. What is left of it is unloaded."""

    model: ModelName
    reason: str


@dataclass(frozen=True)
class ModelUnloaded:
    """The memory of a model is free."""

    model: ModelName


@dataclass(frozen=True)
class ModelTick:
    """Time has passed."""


Event: TypeAlias = (
    ServerStarted
    | Requested
    | Released
    | KeepChosen
    | ModelLoaded
    | LoadFailed
    | ModelEnded
    | ModelUnloaded
    | ModelTick
)


@dataclass(frozen=True)
class Load:
    """Load the model, then report ModelLoaded or LoadFailed."""

    model: ModelName


@dataclass(frozen=True)
class Unload:
    """End the model's pipeline, then report ModelUnloaded. No request runs in it, unless it has ended by itself."""

    model: ModelName


@dataclass(frozen=True)
class Admit:
    """The request may use its model until it is Released."""

    ticket: Ticket


RefusalCause: TypeAlias = Literal["full", "failed", "too_large"]
"""Too many requests wait; the model could not be loaded; the model can never fit."""


@dataclass(frozen=True)
class Refuse:
    """The request has ended. `retry`: seconds after which it is worth sending again."""

    ticket: Ticket
    cause: RefusalCause
    reason: str
    retry: Seconds


Command: TypeAlias = Load | Unload | Admit | Refuse


def gib(count: int) -> str:
    """Bytes, for users."""
    return f"{count / (1 << 30):.1f} GiB"
