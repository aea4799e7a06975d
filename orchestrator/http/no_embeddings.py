"""The routes of embeddings, which say that no embedding model is served."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.errors import ApiError

_PATHS = ("/v1/embeddings", "/api/embed", "/api/embeddings")


def no_embeddings() -> list[Route]:
    return [Route(path, _refuse, methods=["POST"]) for path in _PATHS]


async def _refuse(_: Request) -> Response:
    raise ApiError(
        501,
        "This server has no embedding model: its models generate text. Ask a server of embeddings.",
        code="no_embedding_model",
    )
