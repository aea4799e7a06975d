"""The routes of a server with several models, beside those that a model answers itself."""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.core.model_table import ModelName, Phase, Seconds
from orchestrator.http.access.middleware import shows_key
from orchestrator.http.app import guarded
from orchestrator.http.embeddings.model import embedding_model
from orchestrator.http.embeddings.routes import EmbeddingRoutes
from orchestrator.http.errors import ApiError
from orchestrator.http.model_cards import ANTHROPIC_VERSION, anthropic_card, model_card
from orchestrator.http.models.dispatch import Asked, ChunkForm, Dispatch, LineForm, PingForm, QueuedForm, StreamForm
from orchestrator.http.models.host import LoadedModel, ModelHost
from orchestrator.http.monitoring.health import Condition, Health
from orchestrator.http.monitoring.live import Live
from orchestrator.http.monitoring.metrics import CONTENT_TYPE, Metrics
from orchestrator.http.ollama.answer import empty_line
from orchestrator.http.ollama.request import keep_seconds, own_name
from orchestrator.http.ollama.routes import CHAT, GENERATE, CataloguedModel, CatalogueRoutes, EmbedRoutes, catalogued
from orchestrator.http.responses.routes import ResponseStore, StoredResponses
from orchestrator.http.settings import ServerSettings
from protocol.errors import PipelineError
from protocol.messages.base import SequenceId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame

_NONE = "No model is loaded: the next request loads one."


class LatestModel:
    """The pipeline of that model, as the live page needs it."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def state(self) -> PipelineState | None:
        latest = self._host.latest
        return None if latest is None else await latest.backend.state()

    async def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        latest = self._host.latest
        if latest is None:
            raise PipelineError(_NONE)
        async with aclosing(latest.backend.watch(sequence)) as frames:
            async for frame in frames:
                if self._host.latest is not latest:
                    return
                yield frame


class LatestModelHealth(Health):
    """The condition of that model."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(LatestModel(host))
        self._host = host

    async def check(self) -> Condition:
        latest = self._host.latest
        return Condition("loading", _NONE) if latest is None else await latest.server.condition()


_EMPTY = (b"", b"null", b"[]", b'""')


class OllamaDispatch(Dispatch):
    def __init__(
        self,
        host: ModelHost,
        name_of: Callable[[Asked], ModelName],
        new_form: Callable[[Asked], StreamForm | None],
        patience: Seconds,
        *,
        chat: bool,
    ) -> None:
        """As of Dispatch."""
        super().__init__(host, name_of, new_form, patience)
        self._chat = chat

    def _early(self, name: ModelName, asked: Asked) -> Response | None:
        """A request without a prompt that keeps its model for no time only unloads it."""
        if asked.keep_alive is None or keep_seconds(asked.keep_alive) != 0:
            return None
        if bytes(asked.messages if self._chat else asked.prompt).strip() not in _EMPTY:
            return None
        self._host.keep(name, 0.0)
        return JSONResponse(empty_line(name, chat=self._chat, done=True, done_reason="unload"))

    def _admitted(self, name: ModelName, asked: Asked) -> None:
        if asked.keep_alive is not None:
            self._host.keep(name, keep_seconds(asked.keep_alive))


NewForm: TypeAlias = Callable[[Asked], StreamForm | None]
_FIRST_EVENT_SECONDS = 1.0
"""After which a stream that waits begins; an answer that begins earlier has an HTTP status of its own."""


@dataclass(frozen=True)
class OfferedModel:
    """One model of the table."""

    name: ModelName
    folder: Path
    """Of the target."""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class ModelsServer:
    """Handlers of the routes that are no model's own."""

    def __init__(
        self,
        host: ModelHost,
        models: Sequence[OfferedModel],
        settings: ServerSettings,
        figures: Metrics,
        store: ResponseStore,
    ) -> None:
        """`models`: the first is the default. `figures` and `store` are those of all models."""
        self._host = host
        self._models = models
        self._settings = settings
        self._figures = figures
        self._store = store
        self._created = int(time.time())
        self._embedding = embedding_model(settings, figures.limit)
        self._owners: Mapping[str, OfferedModel] = {name: model for model in models for name in model.names}
        self._defaults = {model.name: settings.sampling_defaults(model.folder) for model in models}
        # The page asks the first one.
        facts = {"models": list(self._owners), "chat": True, "defaults": self._defaults[models[0].name]}
        self._live = Live(LatestModel(host), LatestModelHealth(host), facts)

    def application(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/pipeline/events", self._live.events),
            *self._dispatched(),
            *StoredResponses(self._store).routes,
            *CatalogueRoutes(self).routes,
            *EmbeddingRoutes(self._embedding).routes,
            *EmbedRoutes(self._embedding).routes,
        ]
        return guarded(routes, self._settings, self._figures)

    def stop(self) -> None:
        """End all generation: the server ends."""
        self._live.stop()
        self._host.stop()
        if self._embedding is not None:
            self._embedding.close()

    async def health(self, request: Request) -> Response:
        told = {model.name: await self._told(model.name) for model in self._models}
        failing = next((each for each in told.values() if each["status"] in ("failed", "degraded")), None)
        status, reason = ("ok", "") if failing is None else ("degraded", failing["reason"])
        body: dict[str, Any] = {"status": status}
        # Strangers may ask this too: names and reasons are not theirs, since a reason can quote a log.
        if shows_key(request.headers, self._settings.key):
            body |= {"reason": reason, "waiting": self._host.waiting, "models": told}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        told = [await self._told(model.name) for model in self._models]
        failing = any(each["status"] in ("failed", "degraded") for each in told)
        return Response(self._figures.text(Condition("degraded" if failing else "ok")), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        cards = [await self._card(name, ANTHROPIC_VERSION in request.headers) for name in self._owners]
        if ANTHROPIC_VERSION in request.headers:
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
            return JSONResponse({"data": cards, "has_more": False, **ends})
        if self._embedding is not None:
            cards.append(self._embedding_card())
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self._embedding is not None and name == self._embedding.name:
            return JSONResponse(self._embedding_card())
        self.name_of(name)
        return JSONResponse(await self._card(name, ANTHROPIC_VERSION in request.headers))

    def _embedding_card(self) -> dict[str, Any]:
        assert self._embedding is not None
        return {**model_card(self._embedding.name, self._created, None), "loaded": self._embedding.loaded}

    def name_of(self, name: str | None) -> ModelName:
        """The model that a request names, or the default. Raises ApiError 404: a name is never a path or a download."""
        if name is None:
            return self._models[0].name
        if name not in self._owners:
            known = ", ".join(self._owners)
            raise ApiError(
                404, f"This server has no such model: ask for {known}.", code="model_not_found", param="model"
            )
        return self._owners[name].name

    def require(self, name: str | None) -> None:
        """Raises ApiError 404 for an unknown name."""
        if self._embedding is None or name != self._embedding.name:
            self.name_of(name)

    async def catalogue(self) -> list[CataloguedModel]:
        found = [await self._catalogued(name, model) for name, model in self._owners.items()]
        return found if self._embedding is None else [*found, catalogued(self._embedding)]

    async def _catalogued(self, name: str, offered: OfferedModel) -> CataloguedModel:
        table, model = self._host.status(offered.name), self._host.loaded(offered.name)
        state = None if model is None else await _serving(model)
        left = self._host.left(offered.name)
        return CataloguedModel(
            name,
            offered.folder,
            model is not None,
            state and state.context,
            table.entry.bytes,
            left,
            sampling=self._defaults[offered.name],
        )

    async def _card(self, name: str, anthropic: bool) -> dict[str, Any]:
        owner = self._owners[name].name
        model = self._host.loaded(owner)
        state = None if model is None else await _serving(model)
        if anthropic:
            card = anthropic_card(name, self._created, state and state.context)
        else:
            card = model_card(name, self._created, state and state.level, self._defaults[owner])
        return {**card, "loaded": model is not None}

    async def _told(self, name: ModelName) -> dict[str, Any]:
        """One model's state for /health."""
        table, model = self._host.status(name), self._host.loaded(name)
        if model is not None:
            condition = await model.server.condition()
            status, reason = condition.status, condition.reason
        elif table.phase is Phase.ABSENT:
            status, reason = ("failed", table.failure) if table.failure else ("unloaded", "")
        else:
            status, reason = table.phase.value, self._host.doing(name)
        return {"status": status, "reason": reason, "running": len(table.running), "bytes": table.entry.bytes}

    def _dispatched(self) -> list[Route]:
        patience = min(_FIRST_EVENT_SECONDS, self._settings.keep_alive)
        forms: dict[str, NewForm] = {
            "/v1/completions": lambda asked: ChunkForm(chat=False) if asked.stream is True else None,
            "/v1/chat/completions": lambda asked: ChunkForm(chat=True) if asked.stream is True else None,
            "/v1/responses": lambda asked: QueuedForm() if asked.stream is True else None,
            "/v1/responses/input_tokens": lambda _: None,
            "/v1/messages": lambda asked: PingForm() if asked.stream is True else None,
            "/v1/messages/count_tokens": lambda _: None,
        }
        lines: dict[str, NewForm] = {
            path: lambda asked, chat=path == CHAT: None if asked.stream is False else LineForm(chat=chat)
            for path in (CHAT, GENERATE)
        }

        def named(asked: Asked) -> ModelName:
            return self.name_of(asked.model)

        def named_by_ollama(asked: Asked) -> ModelName:
            return self.name_of(own_name(asked.model or asked.name))

        return [
            *(
                Route(path, Dispatch(self._host, named, form, patience), methods=["POST"])
                for path, form in forms.items()
            ),
            *(
                Route(
                    path,
                    OllamaDispatch(self._host, named_by_ollama, form, patience, chat=path == CHAT),
                    methods=["POST"],
                )
                for path, form in lines.items()
            ),
        ]


async def _serving(model: LoadedModel) -> PipelineState | None:
    return (await model.server.condition()).serving
