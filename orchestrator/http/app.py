"""The server as an ASGI application: routes, middlewares, error handlers."""

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

from orchestrator.http.access.middleware import MESSAGES, FramingGate, HostGate, KeyGate, refusal
from orchestrator.http.anthropic.routes import MessagesRoutes
from orchestrator.http.embeddings.routes import EmbeddingRoutes
from orchestrator.http.errors import ApiError, internal_error
from orchestrator.http.model_cards import ANTHROPIC_VERSION
from orchestrator.http.monitoring.metrics import Counted, Metrics
from orchestrator.http.ollama.routes import CatalogueRoutes, EmbedRoutes, OllamaRoutes
from orchestrator.http.ollama.served import ServedCatalogue
from orchestrator.http.page import page
from orchestrator.http.responses.routes import ResponsesRoutes, ResponseStore, StoredResponses
from orchestrator.http.server import Server
from orchestrator.http.settings import ServerSettings


def application(server: Server, settings: ServerSettings) -> Starlette:
    """All routes of a server with one model, behind the checks of host and key."""
    store = ResponseStore()
    routes = [
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/pipeline/events", server.live.events),
        Route("/v1/pipeline/invitation", server.invitations.create, methods=["POST"]),
        *generation_routes(server, store),
        *StoredResponses(store).routes,
        *CatalogueRoutes(ServedCatalogue(server, settings)).routes,
        *EmbeddingRoutes(server.embedding).routes,
        *EmbedRoutes(server.embedding).routes,
    ]
    return guarded(routes, settings, server.figures)


def generation_routes(server: Server, store: ResponseStore) -> list[Route]:
    """The routes that a model answers."""
    return [
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
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
        Middleware(FramingGate),
        Middleware(HostGate, names=settings.hosts),
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
