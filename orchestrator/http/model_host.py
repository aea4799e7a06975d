"""Does what the table of models decides: loads models as pipelines, unloads them, lets requests for them go on."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.pipeline import Pipeline
from orchestrator.http.app import generation_routes
from orchestrator.http.backend import PipelineBackend, PipelineThread
from orchestrator.http.errors import ApiError
from orchestrator.http.metrics import Metrics
from orchestrator.http.model_table import (
    Admit,
    Command,
    Load,
    ModelName,
    ModelPhase,
    ModelStatus,
    ModelTable,
    RefusalCause,
    Refuse,
    Seconds,
    Ticket,
    Unload,
)
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.settings import ServerSettings
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState

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
    endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]]
    """Of its routes, by path."""
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
        self._perform_all(self._table.start(self._now))

    def lease(self, model: ModelName) -> "Lease":
        """A context in which the model stays in memory from the request's admission on."""
        ticket = Ticket(next(self._tickets))
        lease = self._leases[ticket] = Lease(self, model, ticket)
        self._perform_all(self._table.request(ticket, model, self._now))
        return lease

    def keep(self, model: ModelName, seconds: Seconds | None) -> None:
        """How long a loaded model stays without a request, until it is unloaded; None for ever."""
        self._perform_all(self._table.keep(model, seconds, self._now))

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
        status = self.status(name)
        if status.entry.pinned or status.keep is None:
            return None
        return status.keep if status.running else max(0.0, status.used_at + status.keep - self._now)

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
            self._perform_all(self._table.release(ticket, self._now))

    @property
    def _now(self) -> Seconds:
        return asyncio.get_running_loop().time()

    def _perform_all(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._perform(command)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._table.deadline
        self._timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._perform_all(self._table.tick(self._now))

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
            self._perform_all(self._table.loaded(name, self._now))
            self._run(self._watch(name, model))
        finally:
            self._steps.pop(name, None)

    def _failed(self, name: ModelName, reason: str) -> None:
        self._perform_all(self._table.failed(name, f"The model {name} can't be loaded. {reason}", self._now))

    async def _watch(self, name: ModelName, model: LoadedModel) -> None:
        """Takes a model whose pipeline ends by itself out of the table."""
        reason = await model.ended
        if self._loaded.get(name) is not model:
            return
        log.warning("the pipeline of the model %s has ended: %s", name, reason)
        told = f"The pipeline of the model {name} has ended. {reason}"
        self._perform_all(self._table.ended(name, told, self._now))
        left = self.status(name).barred_until - self._now
        model.server.stop(_unavailable(told, "failed", left))

    async def _unload(self, name: ModelName) -> None:
        try:
            await self._loader.unload(name)
        except Exception:  # the border of a task: its processes have ended, so others can have its memory
            log.exception("the pipeline of the model %s did not end as it should", name)
        self._perform_all(self._table.unloaded(name, self._now))

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
    def progress(self) -> dict[str, Any]:
        """What the request waits for, and since when, in seconds."""
        return {"model": self.name, "status": self._host.doing(self.name), "seconds": round(self.seconds, 1)}

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
        return ApiError(429, refuse.reason, code="queue_full", retry=refuse.retry)
    return _unavailable(refuse.reason, refuse.cause, refuse.retry)


def _unavailable(reason: str, cause: RefusalCause, retry: Seconds) -> ApiError:
    return ApiError(503, reason, code=f"model_{cause}", retry=retry)


@dataclass(frozen=True)
class ModelPipeline:
    """How one model is served."""

    names: tuple[str, ...]
    """Names that requests may use; the first is the model's."""
    target: Path
    """Folder of the target, whose tokenizer and chat template its requests need."""
    make: Callable[[Callable[[str], None]], Pipeline]
    """Makes the pipeline, which is not started yet. It gets a function that takes the step that begins."""


class PipelineLoader:
    def __init__(
        self, models: Sequence[ModelPipeline], settings: ServerSettings, figures: Metrics, store: ResponseStore
    ) -> None:
        """`figures` and `store` are those of all models."""
        self._models = {ModelName(model.names[0]): model for model in models}
        self._settings = settings
        self._figures = figures
        self._store = store
        self._running: dict[ModelName, tuple[Pipeline, PipelineBackend | None]] = {}

    async def load(self, name: ModelName, tell: Callable[[str], None]) -> LoadedModel:
        model = self._models[name]
        pipeline = await asyncio.to_thread(model.make, tell)
        self._running[name] = (pipeline, None)
        ready, ended = Future[PipelineState](), Future[str]()
        for future in (ready, ended):
            # Nobody who waits can cancel them.
            future.set_running_or_notify_cancel()

        def on_end() -> None:
            reason = str(thread.failure or "It was closed.")
            ended.set_result(reason)
            if not ready.done():
                ready.set_exception(PipelineError(reason))

        thread = PipelineThread(pipeline, ready.set_result, on_end)
        thread.start()
        try:
            # A pipeline is closed only once it has started or failed: before that its processes may still come.
            reading = asyncio.to_thread(_text_parts, model.target)
            state, parts = await asyncio.gather(asyncio.wrap_future(ready), reading, return_exceptions=True)
            if isinstance(state, BaseException):
                raise state
            if isinstance(parts, BaseException):
                raise parts
            codec, template = parts
        except BaseException:  # of any kind, also of a cancelled load: its processes must not stay
            await self.unload(name)
            raise
        backend = PipelineBackend(pipeline)
        backend.ready = True
        self._running[name] = (pipeline, backend)
        settings = replace(self._settings, names=model.names, embedding=None)
        server = ModelServer(backend, codec, template, settings, self._figures)
        endpoints = {each.path: each.endpoint for each in generation_routes(server, self._store)}
        return LoadedModel(server, endpoints, asyncio.wrap_future(ended))

    async def unload(self, name: ModelName) -> None:
        pipeline, backend = self._running[name]
        if backend is not None:
            backend.close()
        await asyncio.to_thread(pipeline.close)
        self._running.pop(name, None)

    def close(self) -> None:
        """End all pipelines, at the same time. Called when no event loop runs any more."""
        pipelines = [pipeline for pipeline, _ in self._running.values()]
        if pipelines:
            with ThreadPoolExecutor(len(pipelines)) as threads:
                list(threads.map(Pipeline.close, pipelines))


def _text_parts(folder: Path) -> tuple[TextCodec, ChatTemplate]:
    codec = TextCodec(folder)
    return codec, ChatTemplate(folder, codec)
