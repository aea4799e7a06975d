"""Loads and unloads models as pipelines, each with processes of its own, and ends all of them with the server."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from orchestrator.api.pipeline import Pipeline
from orchestrator.http.app import answering, generation_routes
from orchestrator.http.backend import PipelineBackend, PipelineThread
from orchestrator.http.model_table import ModelName
from orchestrator.http.models.host import LoadedModel
from orchestrator.http.monitoring.metrics import Metrics
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.settings import ServerSettings
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState

T = TypeVar("T")


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
        model, loop = self._models[name], asyncio.get_running_loop()
        pipeline = await asyncio.to_thread(model.make, tell)
        self._running[name] = (pipeline, None)
        ended: asyncio.Future[str] = loop.create_future()
        ready: asyncio.Future[PipelineState] = loop.create_future()

        def on_end() -> None:
            reason = str(thread.failure or "It was closed.")
            _in_loop(loop, lambda: (_resolve(ended, reason), _fail(ready, PipelineError(reason))))

        thread = PipelineThread(pipeline, lambda state: _in_loop(loop, lambda: _resolve(ready, state)), on_end)
        thread.start()
        try:
            # A pipeline is closed only once it has started or failed: before that its processes may still come.
            reading = asyncio.to_thread(_text_parts, model.target)
            state, parts = await asyncio.gather(ready, reading, return_exceptions=True)
            _result(state)
            codec, template = _result(parts)
        except BaseException:  # of any kind, also of a cancelled load: its processes must not stay
            await self.unload(name)
            raise
        backend = PipelineBackend(pipeline)
        backend.ready = True
        self._running[name] = (pipeline, backend)
        settings = replace(self._settings, names=model.names, embedding=None)
        server = ModelServer(backend, codec, template, settings, self._figures)
        routes = generation_routes(server, self._store)
        return LoadedModel(server, answering(routes, settings), ended)

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


def _result(found: T | BaseException) -> T:
    if isinstance(found, BaseException):
        raise found
    return found


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """From another thread. A loop that has ended needs to hear nothing."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[PipelineState]", error: PipelineError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()
