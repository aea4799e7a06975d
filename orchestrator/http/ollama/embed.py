"""/api/embed, and the older /api/embeddings: Ollama's routes of the embedding model."""

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.access.disconnects import unless_gone
from orchestrator.http.body_reading import read_body
from orchestrator.http.embeddings.model import Embedded, EmbeddingModel
from orchestrator.http.embeddings.routes import json_response, named
from orchestrator.http.ollama.names import own_name
from orchestrator.http.request_bodies import decoded


class _EmbedRequest(msgspec.Struct):
    input: str | list[str]
    model: str | None = None
    name: str | None = None
    """What older clients call the model."""
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class _OlderRequest(msgspec.Struct):
    prompt: str
    model: str | None = None
    name: str | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


class EmbedRoutes:
    def __init__(self, model: EmbeddingModel | None) -> None:
        """None: the routes say that there is no embedding model."""
        self._model = model

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.older_embeddings, methods=["POST"]),
        ]

    async def embed(self, request: Request) -> Response:
        question = await read_body(request, lambda content: decoded(content, _EmbedRequest))
        model = named(self._model, own_name(question.model or question.name))
        inputs = [question.input] if isinstance(question.input, str) else question.input
        found = await unless_gone(
            request, model.embed(inputs, truncate=question.truncate, dimensions=question.dimensions)
        )
        return await asyncio.to_thread(_answer, model.name, found)

    async def older_embeddings(self, request: Request) -> Response:
        question = await read_body(request, lambda content: decoded(content, _OlderRequest))
        model = named(self._model, own_name(question.model or question.name))
        found = await unless_gone(request, model.embed([question.prompt], truncate=True))
        return json_response({"embedding": list(found.vectors[0])})


def _answer(name: str, found: Embedded) -> Response:
    vectors = [list(vector) for vector in found.vectors]
    return json_response({"model": name, "embeddings": vectors, "prompt_eval_count": found.tokens})
