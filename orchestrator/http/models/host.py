"""Does what the table of models decides: loads and unloads models, and lets the requests for them go on."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from starlette.types import ASGIApp

from orchestrator.http.errors import ApiError
from orchestrator.http.model_table import (
    Admit,
    Command,
    Event,
    KeepChosen,
    Load,
    LoadFailed,
    ModelEnded,
    ModelLoaded,
    ModelName,
    ModelPhase,
    ModelStatus,
    ModelTable,
    ModelTick,
    ModelUnloaded,
    RefusalCause,
    Refuse,
    Released,
    Requested,
    Seconds,
    ServerStarted,
    Ticket,
    Unload,
)
from orchestrator.http.openai.model_server import ModelServer
from protocol.errors import PipelineError

log = logging.getLogger(__name__)
_WORDS = {
    ModelPhase.ABSENT: "waiting for memory",
    ModelPhase.LOADING: "loading",
    ModelPhase.LOADED: "waiting for a place",
    ModelPhase.UNLOADING: "waiting for memory",
}


@dataclass(frozen=True)
class LoadedModel:
    """One model in memory."""

    server: ModelServer
    app: ASGIApp
    """Answers the model's requests."""
    ended: "asyncio.Future[str]"
    """Why its pipeline has ended, as soon as it has."""


class Loader(Protocol):
    """Starts and ends the pipelines of models."""

    async def load(self, name: ModelName, tell: Callable[[str], None]) -> LoadedModel:
        """`tell` gets the step that begins. Raises PipelineError."""
        ...

    async def unload(self, name: ModelName) -> None:
        """Returns when the model's memory is free."""
        ...


@dataclass(frozen=True)
class WaitingProgress:
    """What a request waits for."""

    model: ModelName
    status: str
    seconds: float
    """Since the request came."""


class ModelHost:
    """Runs in one event loop. `start` and all requests are in it."""

    def __init__(self, table: ModelTable, loader: Loader) -> None:
        self._table = table
        self._loader = loader
        self._loaded: dict[ModelName, LoadedModel] = {}
        self._steps: dict[ModelName, str] = {}
        self._leases: dict[Ticket, Lease] = {}
        self._tickets = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Load the pinned models."""
        self._step(ServerStarted())

    def lease(self, model: ModelName) -> "Lease":
        """A context in which the model stays in memory from the request's admission on."""
        ticket = Ticket(next(self._tickets))
        lease = self._leases[ticket] = Lease(self, model, ticket)
        self._step(Requested(ticket, model))
        return lease

    def keep(self, model: ModelName, seconds: Seconds | None) -> None:
        """How long a loaded model stays without a request, until it is unloaded; None for ever."""
        self._step(KeepChosen(model, seconds))

    def stop(self) -> None:
        """End all generation, and all waiting: the server ends."""
        for model in self._loaded.values():
            model.server.stop()
        for lease in self._leases.values():
            lease.refuse(ApiError(503, "The server was stopped during this request: send it again later."))
        if self._timer is not None:
            self._timer.cancel()

    def status(self, name: ModelName) -> ModelStatus:
        return self._table.models[name]

    def loaded(self, name: ModelName) -> LoadedModel | None:
        return self._loaded.get(name)

    def left(self, name: ModelName) -> Seconds | None:
        """Until the model is unloaded if no request comes; None for never."""
        status, now = self.status(name), asyncio.get_running_loop().time()
        if status.entry.pinned or status.keep is None:
            return None
        return status.keep if status.running else max(0.0, status.used_at + status.keep - now)

    @property
    def latest(self) -> LoadedModel | None:
        """The model in memory that was used last."""
        names = sorted(self._loaded, key=lambda name: self.status(name).used_at)
        return self._loaded[names[-1]] if names else None

    @property
    def waiting(self) -> int:
        return self._table.waiting

    def doing(self, name: ModelName) -> str:
        """What a request for this model waits for."""
        status = self.status(name)
        step = self._steps.get(name) if status.phase is ModelPhase.LOADING else None
        return step or _WORDS[status.phase]

    def release(self, ticket: Ticket) -> None:
        if self._leases.pop(ticket, None) is not None:
            self._step(Released(ticket))

    def _step(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        for command in self._table.step(event, loop.time()):
            self._perform(command)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._table.deadline
        self._timer = None if deadline is None else loop.call_at(deadline, self._step, ModelTick())

    def _perform(self, command: Command) -> None:
        match command:
            case Load(model):
                self._run(self._load(model))
            case Unload(model):
                del self._loaded[model]
                self._run(self._unload(model))
            case Admit(ticket):
                lease = self._leases[ticket]
                lease.admit(self._loaded[lease.name])
            case Refuse(ticket):
                self._leases.pop(ticket).refuse(_refusal(command))

    async def _load(self, name: ModelName) -> None:
        try:
            model = await self._loader.load(name, partial(self._steps.__setitem__, name))
        except PipelineError as error:
            log.warning("the model %s could not be loaded: %s", name, error)
            self._failed(name, str(error))
        except Exception:  # the border of a task: requests that wait for the model are refused
            log.exception("the model %s could not be loaded", name)
            self._failed(name, "The server failed at it: its log has the cause.")
        else:
            self._loaded[name] = model
            self._step(ModelLoaded(name))
            self._run(self._watch(name, model))
        finally:
            self._steps.pop(name, None)

    def _failed(self, name: ModelName, reason: str) -> None:
        self._step(LoadFailed(name, f"The model {name} can't be loaded. {reason}"))

    async def _watch(self, name: ModelName, model: LoadedModel) -> None:
        """Takes a model whose pipeline ends by itself out of the table."""
        reason = await model.ended
        if self._loaded.get(name) is not model:
            return
        log.warning("the pipeline of the model %s has ended: %s", name, reason)
        told = f"The pipeline of the model {name} has ended. {reason}"
        self._step(ModelEnded(name, told))
        left = self.status(name).barred_until - asyncio.get_running_loop().time()
        model.server.stop(_unavailable(told, "failed", left))

    async def _unload(self, name: ModelName) -> None:
        try:
            await self._loader.unload(name)
        except Exception:  # the border of a task: its processes have ended, so others can have its memory
            log.exception("the pipeline of the model %s did not end as it should", name)
        self._step(ModelUnloaded(name))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Lease:
    """One request's claim on a model. A context: its end releases the model, unless `release` did so before."""

    def __init__(self, host: ModelHost, name: ModelName, ticket: Ticket) -> None:
        self.name = name
        self._host = host
        self._ticket = ticket
        self._admitted: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        self._began = asyncio.get_running_loop().time()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admitted.cancel()
        self.release()

    def release(self) -> None:
        """The request needs the model no more. May be called several times."""
        self._host.release(self._ticket)

    async def model(self, patience: Seconds | None = None) -> LoadedModel | None:
        """The model as soon as the request may use it; None if that is not within `patience`.

        Raises ApiError: 429 if too many requests wait, 503 if the model can't be loaded or never fits.
        """
        await asyncio.wait({self._admitted}, timeout=patience)
        return self._admitted.result() if self._admitted.done() else None

    @property
    def seconds(self) -> Seconds:
        """Since the request came."""
        return asyncio.get_running_loop().time() - self._began

    @property
    def progress(self) -> WaitingProgress:
        return WaitingProgress(self.name, self._host.doing(self.name), round(self.seconds, 1))

    def admit(self, model: LoadedModel) -> None:
        if not self._admitted.done():
            self._admitted.set_result(model)

    def refuse(self, error: ApiError) -> None:
        if not self._admitted.done():
            self._admitted.set_exception(error)
            # A client that has gone does not ask for it.
            self._admitted.exception()


def _refusal(refuse: Refuse) -> ApiError:
    if refuse.cause == "full":
        return ApiError(429, refuse.reason, code="queue_full", headers=_retry(refuse.retry))
    return _unavailable(refuse.reason, refuse.cause, refuse.retry)


def _unavailable(reason: str, cause: RefusalCause, retry: Seconds) -> ApiError:
    return ApiError(503, reason, code=f"model_{cause}", headers=_retry(retry))


def _retry(seconds: Seconds) -> Mapping[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))} if seconds else {}
