"""Which of several models are in memory, and which requests wait for one. Pure: events and the time in, commands out.

Loads one on request, unloads one that is idle or whose memory another needs. Requests for a model that is not loaded
wait. Models are loaded in the order of their first waiting request. If the next one lacks memory, models are unloaded
for it, least recently used and idle ones first; if only models with running requests are left, the chosen ones admit no
further requests, which then wait behind that model. So no request starves. A model that was loaded admits all requests
that wait for it then, before it can be unloaded for another one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NewType, TypeAlias

FULL_RETRY_SECONDS = 5.0
"""When a request that found too many others waiting may come again."""
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
class Load:
    """Load the model, then report `loaded` or `failed`."""

    model: ModelName


@dataclass(frozen=True)
class Unload:
    """End the model's pipeline, then report `unloaded`. No request runs in it, unless it has ended by itself."""

    model: ModelName


@dataclass(frozen=True)
class Admit:
    """The request may use its model until its `release`."""

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


class ModelPhase(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass
class ModelStatus:
    """One model as it is now."""

    entry: ModelEntry
    keep: Seconds | None
    phase: ModelPhase = ModelPhase.ABSENT
    running: set[Ticket] = field(default_factory=set)
    used_at: Seconds = 0.0
    """When a request was last admitted, when the last running one ended, or when the model was loaded. An end beside
    other requests does not count: it would make another model the one that is drained."""
    failure: str = ""
    """Why it was last not loaded, or ended; empty since it was loaded."""
    barred_until: Seconds = 0.0
    """After a failure: when it may be loaded again."""

    @property
    def idle_until(self) -> Seconds | None:
        """When a loaded model is unloaded if no request comes; None for never."""
        if self.phase is not ModelPhase.LOADED or self.running or self.entry.pinned or self.keep is None:
            return None
        return self.used_at + self.keep


class ModelTable:
    """The state of all models. Each method takes what has happened and returns what the shell must now do."""

    def __init__(
        self, entries: Sequence[ModelEntry], *, room: int, keep: Seconds | None, most_waiting: int, pause: Seconds
    ) -> None:
        """`room`: bytes for all models together. `keep`: how long a model without requests stays loaded, None for
        ever. `pause`: after a failure, seconds until the model is loaded again. `entries` has the pinned models, which
        must fit together."""
        self.models = {entry.name: ModelStatus(entry, keep) for entry in entries}
        self._room = room
        self._keep = keep
        self._most_waiting = most_waiting
        self._pause = pause
        self._waiting: dict[Ticket, ModelName] = {}
        """In the order of arrival."""

    def start(self, now: Seconds) -> list[Command]:
        """The server listens: pinned models are loaded."""
        absent = [each for each in self.models.values() if each.entry.pinned and each.phase is ModelPhase.ABSENT]
        return [*map(self._load, absent), *self._schedule(now)]

    def request(self, ticket: Ticket, model: ModelName, now: Seconds) -> list[Command]:
        """A request names a model."""
        refusal = self._refusal(ticket, self.models[model], now)
        if refusal is not None:
            return [refusal]
        self._waiting[ticket] = model
        return self._schedule(now)

    def release(self, ticket: Ticket, now: Seconds) -> list[Command]:
        """A request has ended, or its client has gone, whether it was admitted or still waits."""
        self._waiting.pop(ticket, None)
        for status in self.models.values():
            if ticket in status.running:
                status.running.remove(ticket)
                if not status.running:
                    status.used_at = now
        return self._schedule(now)

    def keep(self, model: ModelName, seconds: Seconds | None, now: Seconds) -> list[Command]:
        """How long this model stays loaded without a request, until it is unloaded; None for ever. Without effect on a
        model that is not loaded."""
        if self.models[model].phase in (ModelPhase.LOADING, ModelPhase.LOADED):
            self.models[model].keep = seconds
        return self._schedule(now)

    def loaded(self, model: ModelName, now: Seconds) -> list[Command]:
        status = self.models[model]
        status.phase, status.failure, status.used_at = ModelPhase.LOADED, "", now
        waiting = [ticket for ticket, name in self._waiting.items() if name == model]
        return [*self._admit(waiting, now), *self._schedule(now)]

    def failed(self, model: ModelName, reason: str, now: Seconds) -> list[Command]:
        """A model could not be loaded. Its memory is free."""
        return [*self._fail(self.models[model], reason, now), *self._schedule(now)]

    def ended(self, model: ModelName, reason: str, now: Seconds) -> list[Command]:
        """The pipeline of a loaded model has ended by itself. What is left of it is unloaded."""
        refused = [*self._fail(self.models[model], reason, now)]
        self.models[model].phase = ModelPhase.UNLOADING
        return [Unload(model), *refused, *self._schedule(now)]

    def unloaded(self, model: ModelName, now: Seconds) -> list[Command]:
        """The memory of a model is free."""
        self._forget(self.models[model])
        return self._schedule(now)

    def tick(self, now: Seconds) -> list[Command]:
        """Time has passed."""
        return self._schedule(now)

    @property
    def deadline(self) -> Seconds | None:
        """When the next `tick` is due; None without one."""
        return min((until for status in self.models.values() if (until := status.idle_until) is not None), default=None)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def _refusal(self, ticket: Ticket, status: ModelStatus, now: Seconds) -> Refuse | None:
        entry, most = status.entry, self._most(status)
        if status.phase is ModelPhase.ABSENT and entry.bytes > most:
            reason = (
                f"The model {entry.name} needs {entry.need}, and {gib(max(most, 0))} are left for it: choose a "
                "smaller one, a shorter context or 8-bit KV, or raise --models-memory."
            )
            return Refuse(ticket, "too_large", reason, 0.0)
        if status.phase in (ModelPhase.ABSENT, ModelPhase.UNLOADING) and now < status.barred_until:
            return Refuse(ticket, "failed", status.failure, status.barred_until - now)
        if len(self._waiting) >= self._most_waiting and not self._admits(status):
            reason = f"{len(self._waiting)} requests wait for models already: try again in a moment."
            return Refuse(ticket, "full", reason, FULL_RETRY_SECONDS)
        return None

    def _most(self, status: ModelStatus) -> int:
        """Bytes that this model can have at most, beside pinned ones."""
        others = (other.entry for other in self.models.values() if other is not status)
        return self._room - sum(entry.bytes for entry in others if entry.pinned)

    def _admits(self, status: ModelStatus) -> bool:
        """Whether a request for a loaded model needs not wait."""
        return status.phase is ModelPhase.LOADED and status.entry.name not in self._victims()

    def _fail(self, status: ModelStatus, reason: str, now: Seconds) -> Iterator[Command]:
        """Requests that run see the end of their pipeline themselves."""
        self._forget(status)
        status.failure, status.barred_until = reason, now + self._pause
        for ticket in [ticket for ticket, model in self._waiting.items() if model == status.entry.name]:
            del self._waiting[ticket]
            yield Refuse(ticket, "failed", reason, self._pause)

    def _forget(self, status: ModelStatus) -> None:
        """The model is not in memory any more."""
        status.phase, status.keep = ModelPhase.ABSENT, self._keep

    def _schedule(self, now: Seconds) -> list[Command]:
        ahead, behind = self._admissible()
        commands: list[Command] = [*self._admit(ahead, now)]
        victims = self._victims()
        commands += [self._unload(self.models[name]) for name in victims if not self.models[name].running]
        commands += self._admit((ticket for ticket in behind if self._waiting[ticket] not in victims), now)
        commands += self._load_waiting()
        return [*commands, *self._unload_idle(now)]

    def _admissible(self) -> tuple[list[Ticket], list[Ticket]]:
        """Requests that wait for models that are loaded: ahead of the head's first one, and behind it."""
        head = self._head()
        ahead: list[Ticket] = []
        behind: list[Ticket] = []
        found = ahead
        for ticket, model in self._waiting.items():
            status = self.models[model]
            if status is head:
                found = behind
            elif status.phase is ModelPhase.LOADED:
                found.append(ticket)
        return ahead, behind

    def _admit(self, tickets: Iterable[Ticket], now: Seconds) -> Iterator[Command]:
        for ticket in tickets:
            status = self.models[self._waiting.pop(ticket)]
            status.running.add(ticket)
            status.used_at = now
            yield Admit(ticket)

    def _load_waiting(self) -> Iterator[Command]:
        """In order: a later model does not take the memory that an earlier one waits for."""
        for model in dict.fromkeys(self._waiting.values()):
            status = self.models[model]
            if status.phase is ModelPhase.ABSENT:
                if status.entry.bytes > self._free:
                    return
                yield self._load(status)

    def _unload_idle(self, now: Seconds) -> Iterator[Command]:
        for status in self.models.values():
            until = status.idle_until
            if until is not None and now >= until:
                yield self._unload(status)

    def _head(self) -> ModelStatus | None:
        """The first waiting model that is not in memory."""
        models = (self.models[model] for model in self._waiting.values())
        return next((status for status in models if status.phase in (ModelPhase.ABSENT, ModelPhase.UNLOADING)), None)

    def _victims(self) -> list[ModelName]:
        """Loaded models that must go so that the head fits, beside those that are going already."""
        head = self._head()
        if head is None:
            return []
        free = self._free + sum(self._bytes(ModelPhase.UNLOADING))
        chosen: list[ModelName] = []
        loaded = [each for each in self.models.values() if each.phase is ModelPhase.LOADED and not each.entry.pinned]
        for status in sorted(loaded, key=lambda each: (bool(each.running), each.used_at)):
            if free >= head.entry.bytes:
                break
            free += status.entry.bytes
            chosen.append(status.entry.name)
        return chosen

    def _load(self, status: ModelStatus) -> Load:
        assert status.entry.bytes <= self._free
        status.phase = ModelPhase.LOADING
        return Load(status.entry.name)

    def _unload(self, status: ModelStatus) -> Unload:
        assert not status.running
        status.phase = ModelPhase.UNLOADING
        return Unload(status.entry.name)

    @property
    def _free(self) -> int:
        return self._room - sum(self._bytes(ModelPhase.LOADING, ModelPhase.LOADED, ModelPhase.UNLOADING))

    def _bytes(self, *phases: ModelPhase) -> Iterator[int]:
        return (status.entry.bytes for status in self.models.values() if status.phase in phases)
