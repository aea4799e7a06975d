"""/v1/embeddings."""

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.access.disconnects import unless_gone
from orchestrator.http.embeddings.model import Embedded, EmbeddingModel
from orchestrator.http.embeddings.request import EmbeddingRequest, Input
from orchestrator.http.errors import ApiError
from orchestrator.http.request_bodies import decoded, read_body


class EmbeddingRoutes:
    def __init__(self, model: EmbeddingModel | None) -> None:
        """None: the route says that there is no embedding model."""
        self._model = model

    @property
    def routes(self) -> list[Route]:
        return [Route("/v1/embeddings", self.embeddings, methods=["POST"])]

    async def embeddings(self, request: Request) -> Response:
        question, inputs = await read_body(request, _read)
        model = named(self._model, question.model)
        found = await unless_gone(request, model.embed(inputs, dimensions=question.dimensions))
        return await asyncio.to_thread(_answer, model.name, found, question.encoding_format == "base64")


def named(model: EmbeddingModel | None, name: str | None) -> EmbeddingModel:
    """The server's embedding model, for a request that names it or none. Raises ApiError 501 without a model, 404 for
    another name."""
    if model is None:
        raise ApiError(
            501, "This server has no embedding model: start it with --embedding-model.", code="no_embedding_model"
        )
    if name is not None and name != model.name:
        raise ApiError(
            404,
            f"This server has no such embedding model: ask for {model.name}.",
            code="model_not_found",
            param="model",
        )
    return model


def json_response(content: Any) -> Response:
    """Many numbers take a while: for a thread."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _read(content: bytes) -> tuple[EmbeddingRequest, Sequence[Input]]:
    question = decoded(content, EmbeddingRequest)
    return question, question.inputs


def _answer(name: str, found: Embedded, packed: bool) -> Response:
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if packed else list(vector)}
        for index, vector in enumerate(found.vectors)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


def _base64(vector: Sequence[float]) -> str:
    """Float32, little-endian, as OpenAI has it."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
