"""The server as an ASGI application: its routes behind the gates, and what becomes of errors."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.anthropic.routes import MessagesRoutes
from orchestrator.http.errors import ApiError
from orchestrator.http.middleware import HostGate, KeyGate, refusal
from orchestrator.http.monitoring.metrics import Counted
from orchestrator.http.page import page
from orchestrator.http.responses.routes import ResponsesRoutes
from orchestrator.http.server import Server
from orchestrator.http.settings import ServerSettings


def application(server: Server, settings: ServerSettings) -> Starlette:
    """Its routes, behind the gates."""
    routes = [
        Route("/", page),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/pipeline/events", server.live.events),
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        *ResponsesRoutes(server, settings).routes,
        *MessagesRoutes(server).routes,
    ]
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(Counted, metrics=server.figures, routes=paths),
        Middleware(HostGate, names=settings.hosts),
        Middleware(KeyGate, key=settings.key, most_bytes=settings.most_bytes),
    ]
    if settings.origins:
        # Before the key is asked for: browsers ask whether they may without one.
        cors = Middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(2, cors)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error, request.url.path)


async def _on_wrong_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    return refusal(ApiError(error.status_code, f"{request.method} {path}: {error.detail}."), path)


async def _on_gone(*_: object) -> Response:
    return Response(status_code=499)


async def _on_bug(request: Request, _: Exception) -> Response:
    return refusal(ApiError(500, "The server failed at this request: its log says why."), request.url.path)


_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _on_api_error,
    HTTPException: _on_wrong_route,
    ClientDisconnect: _on_gone,
    Exception: _on_bug,
}
