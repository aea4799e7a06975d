"""The server: the routes that no model answers, and the models behind the others. One model is a table of one."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.api.owner import attach_command
from orchestrator.http.embeddings import EmbeddingModel, embedding_routes
from orchestrator.http.errors import ANTHROPIC_VERSION, RETRY_SECONDS, ApiError, of_pipeline
from orchestrator.http.gates import shows_key
from orchestrator.http.live import LOADING, Checkable, Condition, Live, StateSource, Watchable
from orchestrator.http.metrics import CONTENT_TYPE, Metrics
from orchestrator.http.model_table import ModelName, Seconds
from orchestrator.http.ollama.routes import CataloguedModel, CatalogueRoutes, catalogued, embed_routes
from orchestrator.http.openai.model_server import ModelServer, background, unknown_model
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.settings import ServerSettings
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation

_CONTEXT_LENGTHS = ("context_length", "max_model_len", "context_window", "max_context_length", "loaded_context_length")
"""What clients of OpenRouter, vLLM, Codex and LM Studio call the context of a model."""


class Invitations:
    """`POST /v1/pipeline/invitation`: a join line, good for one machine."""

    def __init__(self, invite: Callable[[], Invitation] | None, pipeline: StateSource, key: str | None) -> None:
        """`invite` is None for a pipeline that no other machine can join. Without a `key` nobody is known to be the
        owner, so nobody gets a line."""
        self._invite = invite
        self._pipeline = pipeline
        self._key = key

    @property
    def offered(self) -> bool:
        return self._invite is not None and self._key is not None

    async def create(self, _: Request) -> Response:
        if self._invite is None:
            raise ApiError(404, "No machine can join this pipeline: start the server with --listen HOST:PORT.")
        if self._key is None:
            raise ApiError(
                403, "A server without a key gives no join lines: run `launch-pipeline workers invite` beside it."
            )
        try:
            state = await self._pipeline.state()
            if state is None:
                raise ApiError(503, LOADING, code="loading", retry=RETRY_SECONDS)
            invitation = await asyncio.to_thread(self._invite)
        except PipelineError as error:
            raise of_pipeline(error) from error
        told: dict[str, Any] = {
            "line": invitation.line,
            "command": attach_command(invitation, state),
            "seconds": invitation.seconds,
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})


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


class ServedModels(Protocol):
    """The models behind a server: one that is there from the start, or several that are loaded on demand."""

    offered: Sequence[OfferedModel]
    """The first is the default."""

    @property
    def shown(self) -> Watchable:
        """The pipeline that the page shows."""
        ...

    @property
    def health(self) -> Checkable:
        """Of that pipeline."""
        ...

    @property
    def chats(self) -> bool:
        """Whether the page may chat."""
        ...

    def server(self, name: ModelName) -> ModelServer | None:
        """Of a model in memory."""
        ...

    def memory(self, name: ModelName) -> tuple[int | None, Seconds | None]:
        """Bytes that the model takes while it is loaded, None for the size of its weights; and the time until it is
        unloaded if it stays idle, None for never."""
        ...

    async def report(self) -> tuple[Condition, dict[str, Any]]:
        """The condition of all, and what only those who have the key may know beside its reason."""
        ...

    def routes(self, names: Callable[[str | None], ModelName]) -> list[Route]:
        """Those that models answer. `names` gives the model that a request names."""
        ...

    def stop(self) -> None:
        """End all work: the server ends."""
        ...


class Server:
    """Handlers of the routes that no model answers."""

    def __init__(
        self,
        models: ServedModels,
        settings: ServerSettings,
        figures: Metrics,
        store: ResponseStore,
        invitations: Invitations | None = None,
    ) -> None:
        """`figures` and `store` are those of all models. Without `invitations` the server has no such route."""
        self.models = models
        self.figures = figures
        self.settings = settings
        self._store = store
        self._invitations = invitations
        self._created = int(time.time())
        embedding = settings.embedding
        self._embedding = None if embedding is None else EmbeddingModel(embedding, figures.limit)
        self._owners: Mapping[str, OfferedModel] = {name: model for model in models.offered for name in model.names}
        self._defaults = {model.name: settings.sampling_defaults(model.folder) for model in models.offered}
        facts = {
            "models": list(self._owners),
            "chat": models.chats,
            # The page asks the first one.
            "defaults": self._defaults[models.offered[0].name],
            **({} if invitations is None else {"joins": invitations.offered}),
        }
        self._live = Live(models.shown, models.health, facts)

    @property
    def routes(self) -> list[Route]:
        invitations = self._invitations
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/v1/pipeline/events", self._live.events),
            *([] if invitations is None else [Route("/v1/pipeline/invitation", invitations.create, methods=["POST"])]),
            *self.models.routes(self.name_of),
            *self._store.routes,
            *CatalogueRoutes(self).routes,
            *embedding_routes(self._embedding),
            *embed_routes(self._embedding),
        ]

    def stop(self) -> None:
        """End all work: the server ends."""
        self._live.stop()
        self.models.stop()
        if self._embedding is not None:
            self._embedding.close()

    async def health(self, request: Request) -> Response:
        condition, more = await self.models.report()
        body: dict[str, Any] = {"status": condition.status}
        # Strangers may ask this too: names and reasons are not theirs, since a reason can quote a log.
        if shows_key(request.headers, self.settings.key):
            body |= {"reason": condition.reason, **more}
        return JSONResponse(body, 200 if condition.status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        condition, _ = await self.models.report()
        return Response(self.figures.text(condition), media_type=CONTENT_TYPE)

    async def list_models(self, request: Request) -> Response:
        if ANTHROPIC_VERSION in request.headers:
            cards = [await self._anthropic_card(name) for name in self._owners]
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
            return JSONResponse({"data": cards, "has_more": False, **ends})
        cards = [await self._card(name) for name in self._owners]
        if self._embedding is not None:
            cards.append(await self._card(self._embedding.name))
        listed = {"object": "list", "data": cards}
        # Codex wants a list of its own form, whose entries would replace its instructions.
        return JSONResponse({**listed, "models": []} if "client_version" in request.query_params else listed)

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.require(name)
        anthropic = ANTHROPIC_VERSION in request.headers and not self._embeds(name)
        return JSONResponse(await (self._anthropic_card(name) if anthropic else self._card(name)))

    def name_of(self, name: str | None) -> ModelName:
        """The model that a request names, or the default. Raises ApiError 404: a name is never a path or a download.

        A background request does not load a model if another one is there."""
        if name is None:
            return self.models.offered[0].name
        if background(name, self._owners):
            names = [model.name for model in self.models.offered]
            return next((each for each in names if self.models.server(each) is not None), names[0])
        owner = self._owners.get(name)
        if owner is None:
            raise unknown_model(list(self._owners))
        return owner.name

    def require(self, name: str | None) -> None:
        """Raises ApiError 404 for an unknown name."""
        if not self._embeds(name):
            self.name_of(name)

    async def catalogue(self) -> list[CataloguedModel]:
        """Each model under each of its names, for Ollama's API."""
        found = [await self._catalogued(name, model) for name, model in self._owners.items()]
        return found if self._embedding is None else [*found, catalogued(self._embedding)]

    async def _catalogued(self, name: str, offered: OfferedModel) -> CataloguedModel:
        state = await self._state(offered.name)
        bytes, left = self.models.memory(offered.name)
        context = state and state.context
        sampling = self._defaults[offered.name]
        return CataloguedModel(name, offered.folder, state is not None, context, bytes, left, sampling=sampling)

    def _embeds(self, name: str | None) -> bool:
        return self._embedding is not None and name == self._embedding.name

    async def _state(self, name: ModelName) -> PipelineState | None:
        """None for a model that does not serve now."""
        server = self.models.server(name)
        return None if server is None else (await server.health.check()).serving

    async def _card(self, name: str) -> dict[str, Any]:
        """In OpenAI's form. `level`: what the target verifies in one forward; `knows_tools`: of the chat template. None
        until that is known."""
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "launch-pipeline"}
        if self._embedding is not None and self._embeds(name):
            return {**card, "level": None, "loaded": self._embedding.loaded}
        owner = self.name_of(name)
        state, server = await self._state(owner), self.models.server(owner)
        defaults, context = self._defaults[owner], state and state.context
        more = {
            "level": state and state.level,
            "loaded": state is not None,
            "knows_tools": server and server.knows_tools,
        }
        lengths = dict.fromkeys(_CONTEXT_LENGTHS, context)
        return {**card, **more, "sampling_defaults": defaults, "default_parameters": defaults, **lengths}

    async def _anthropic_card(self, name: str) -> dict[str, Any]:
        """In Anthropic's form. Contexts are None until they are known."""
        state = await self._state(self.name_of(name))
        context = state and state.context
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": context,
            "max_tokens": context,
            "loaded": state is not None,
        }
