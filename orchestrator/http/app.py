"""The server as an ASGI application: routes, middlewares, error handlers; and the server of one model."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.anthropic import MessagesRoutes
from orchestrator.http.errors import ANTHROPIC_VERSION, ApiError, internal_error
from orchestrator.http.gates import MESSAGES, FrontGate, KeyGate, refusal
from orchestrator.http.live import Condition
from orchestrator.http.metrics import Counted, Metrics
from orchestrator.http.model_table import ModelName, Seconds
from orchestrator.http.ollama.routes import OllamaRoutes
from orchestrator.http.openai.model_server import Backend, ModelServer
from orchestrator.http.openai.routes import CompletionRoutes
from orchestrator.http.page import page
from orchestrator.http.responses.routes import ResponsesRoutes, ResponseStore
from orchestrator.http.server import Invitations, OfferedModel, Server
from orchestrator.http.settings import ServerSettings
from orchestrator.http.work import AdmissionLimit
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.remote import Invitation


def application(server: Server) -> Starlette:
    """All routes of a server, behind the checks of host and key."""
    return guarded(server.routes, server.settings, server.figures)


def generation_routes(server: ModelServer, store: ResponseStore) -> list[Route]:
    """The routes that a model answers."""
    return [
        *CompletionRoutes(server).routes,
        *ResponsesRoutes(server, store).routes,
        *MessagesRoutes(server).routes,
        *OllamaRoutes(server).routes,
    ]


def guarded(routes: Sequence[Route], settings: ServerSettings, figures: Metrics) -> Starlette:
    """The page and `routes`, behind the checks of host and key."""
    routes = [Route("/", page), *routes]
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(Counted, metrics=figures, routes=paths),
        Middleware(FrontGate, names=settings.hosts),
        Middleware(KeyGate, key=settings.key, most_bytes=settings.most_bytes, origins=settings.origins),
    ]
    if settings.origins:
        # Before the key is checked: browsers send preflight requests without it.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )
        middleware.insert(-1, cors)
    return answering(routes, settings, middleware)


def answering(routes: Sequence[Route], settings: ServerSettings, middleware: Sequence[Middleware] = ()) -> Starlette:
    """`routes`, whose errors are answered in the form of their API."""
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)
    app.state.body_seconds = settings.connections.body_seconds
    app.state.long_bodies = asyncio.Lock()
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error, MESSAGES if ANTHROPIC_VERSION in request.headers else request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path}: {error.detail}."
    return refusal(ApiError(error.status_code, message, headers=error.headers), path)


async def _on_disconnect(*_: object) -> Response:
    return Response(status_code=499)


async def _on_failure(request: Request, _: Exception) -> Response:
    return refusal(internal_error(), request.url.path)


_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _on_api_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
    Exception: _on_failure,
}


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
        self.shown = server.backend
        self._server = server
        self._store = store

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
