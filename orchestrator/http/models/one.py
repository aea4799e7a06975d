"""One model behind a server, whose pipeline is there from the start: the server ends with it."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.routing import Route

from orchestrator.http.access.admission_limit import AdmissionLimit
from orchestrator.http.app import generation_routes
from orchestrator.http.model_table import ModelName, Seconds
from orchestrator.http.monitoring.health import Condition
from orchestrator.http.monitoring.live import Watchable
from orchestrator.http.monitoring.metrics import Metrics
from orchestrator.http.openai.model_server import Backend, ModelServer
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.server import Invitations, OfferedModel, Server
from orchestrator.http.settings import ServerSettings
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.remote import Invitation


def server_of_one(
    backend: Backend,
    codec: TextCodec,
    template: ChatTemplate,
    settings: ServerSettings,
    invite: Callable[[], Invitation] | None = None,
) -> Server:
    """`invite` makes a join line; None if no other machine can join the pipeline."""
    figures, store = Metrics(AdmissionLimit(settings.most_open)), ResponseStore()
    model = OneModel(ModelServer(backend, codec, template, settings, figures), settings, store)
    return Server(model, settings, figures, store, Invitations(invite, backend, settings.key))


class OneModel:
    """The table of one model, as `ServedModels` has it."""

    def __init__(self, server: ModelServer, settings: ServerSettings, store: ResponseStore) -> None:
        name, *aliases = settings.names
        self.offered: Sequence[OfferedModel] = [OfferedModel(ModelName(name), server.template.folder, tuple(aliases))]
        self.health = server.health
        self.chats = server.template.own
        self._server = server
        self._store = store

    @property
    def shown(self) -> Watchable:
        return self._server.backend

    def server(self, name: ModelName) -> ModelServer:
        return self._server

    def memory(self, name: ModelName) -> tuple[int | None, Seconds | None]:
        return None, None

    async def report(self) -> tuple[Condition, dict[str, Any]]:
        return await self.health.check(), {}

    def routes(self, names: Callable[[str | None], ModelName]) -> list[Route]:
        return generation_routes(self._server, self._store)

    def stop(self) -> None:
        self._server.stop()
