"""Models with scripted output behind one server, whose loads end when the test says so."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import uvicorn

from orchestrator.http.app import application, generation_routes
from orchestrator.http.metrics import Metrics
from orchestrator.http.model_host import LoadedModel, ModelHost
from orchestrator.http.model_table import ModelEntry, ModelName, ModelTable
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.run import http_server
from orchestrator.http.server import OfferedModel, Server
from orchestrator.http.settings import ServerSettings
from orchestrator.http.several_models import SeveralModels
from orchestrator.http.work import AdmissionLimit
from protocol.errors import PipelineError
from tests.support.asked_server import CODEC, KEY, TEMPLATE, client_of
from tests.support.fake_pipeline import FakePipeline
from tests.support.paths import DEMO_TARGET

T = TypeVar("T")
_SECONDS = 20.0


@dataclass
class FakeModels:
    """Each model says its own name. `big` and `other` do not fit beside one another."""

    entries: Sequence[ModelEntry] = (
        ModelEntry(ModelName("big"), 6),
        ModelEntry(ModelName("other"), 6),
        ModelEntry(ModelName("small"), 4),
    )
    aliases: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"small": ("gpt-4o-mini",)})
    room: int = 10
    most_waiting: int = 4
    failures: dict[str, str] = field(default_factory=dict)
    """Why a model can't be loaded, or unloaded."""
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """Loads that last until their event is set."""
    pipelines: dict[str, FakePipeline] = field(default_factory=dict)
    ended: dict[str, "asyncio.Future[str]"] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    told: int = 0
    """How often a stream that waits was told why."""

    def serve(self, **settings: Any) -> tuple[ModelHost, Server]:
        given = ServerSettings(**{"names": (), "key": KEY, "keep_alive": 0.02, **settings})
        loader = _Loader(self, given)
        table = ModelTable(self.entries, room=self.room, keep=60.0, most_waiting=self.most_waiting, pause=30.0)
        host = _Host(self, table, loader)
        offered = [OfferedModel(entry.name, DEMO_TARGET, self.aliases.get(entry.name, ())) for entry in self.entries]
        return host, Server(SeveralModels(host, offered, given.keep_alive), given, loader.figures, loader.store)

    async def until_told(self) -> None:
        """Until a stream that waits was told why."""
        while not self.told:
            await asyncio.sleep(0.01)

    async def streamed_while_loading(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> httpx.Response:
        """The stream of a request for `big` that was told why it waits. Ollama's APIs stream unless told not to."""
        self.held["big"] = asyncio.Event()
        stream = None if path.startswith("/api/") else True
        asking = asyncio.create_task(client.post(path, json={**body, "stream": stream}))
        await self.until_told()
        self.held["big"].set()
        return await asking

    def listener(self) -> uvicorn.Server:
        """What listens for requests to them."""
        _, server = self.serve()
        return http_server(server)

    def talk(self, conversation: Callable[[httpx.AsyncClient, ModelHost], Awaitable[T]], **settings: Any) -> T:
        """Send requests to a server in this process."""

        async def held() -> T:
            host, server = self.serve(**settings)
            host.start()
            headers = {"authorization": f"Bearer {KEY}"}
            async with asyncio.timeout(_SECONDS), client_of(application(server), headers=headers) as client:
                try:
                    return await conversation(client, host)
                finally:
                    server.stop()

        return asyncio.run(held())


class _Host(ModelHost):
    def __init__(self, models: FakeModels, table: ModelTable, loader: "_Loader") -> None:
        super().__init__(table, loader)
        self._models = models

    def doing(self, name: ModelName) -> str:
        self._models.told += 1
        return super().doing(name)


class _Loader:
    def __init__(self, models: FakeModels, settings: ServerSettings) -> None:
        self._models = models
        self._settings = settings
        self.figures = Metrics(AdmissionLimit(settings.most_open))
        self.store = ResponseStore()

    async def load(self, name: ModelName, tell: Callable[[str], None]) -> LoadedModel:
        models = self._models
        models.loads.append(name)
        tell("reading weights")
        if name in models.held:
            await models.held[name].wait()
        if name in models.failures:
            raise PipelineError(models.failures[name])
        pipeline = models.pipelines.setdefault(name, FakePipeline(pieces=lambda _: [name]))
        settings = replace(self._settings, names=(name, *models.aliases.get(name, ())))
        server = ModelServer(pipeline, CODEC, TEMPLATE, settings, self.figures)
        endpoints = {each.path: each.endpoint for each in generation_routes(server, self.store)}
        models.ended[name] = asyncio.get_running_loop().create_future()
        return LoadedModel(server, endpoints, models.ended[name])

    async def unload(self, name: ModelName) -> None:
        self._models.unloads.append(name)
        if name in self._models.failures:
            raise OSError(self._models.failures[name])
