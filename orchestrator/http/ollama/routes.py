"""/api/*: the routes of Ollama's API: chats, generations, embeddings, and the list of the models from their folders."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.embeddings import Embedded, EmbeddingModel, json_response, named
from orchestrator.http.generation import EventStream
from orchestrator.http.model_table import Seconds
from orchestrator.http.ollama.answer import MEDIA_TYPE, OllamaAnswer, empty_line
from orchestrator.http.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    keep_seconds,
    own_name,
)
from orchestrator.http.openai.answer_content import AnswerContent
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.prompts import Asked, ChatPrompts, PreparedRequest
from orchestrator.http.openai.translation import read_fields
from orchestrator.http.request_bodies import decoded, read_body
from orchestrator.http.work import body, unless_gone
from orchestrator.text.chat_template import ChatTemplate
from protocol.contracts.model_folder import ModelFolder

CHAT, GENERATE = "/api/chat", "/api/generate"


class OllamaRoutes:
    def __init__(self, server: ModelServer) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [
            Route(CHAT, partial(self._answer, OllamaChatRequest), methods=["POST"]),
            Route(GENERATE, partial(self._answer, OllamaGenerateRequest), methods=["POST"]),
        ]

    async def _answer(self, kind: type[OllamaRequest], request: Request) -> Response:
        question, asked = await read_body(request, lambda content: _read(content, kind))
        chat = kind is OllamaChatRequest
        if asked is None:
            return await self._empty(question, chat=chat)
        (name, asked), codec = self._server.named(asked), self._server.codec
        # How long the request waited for its model.
        loading: float = getattr(request.state, "loading_seconds", 0.0)

        def answer(prompt: PreparedRequest) -> OllamaAnswer:
            return OllamaAnswer(name, AnswerContent(prompt, asked, codec), chat=chat, loading=loading)

        response = await self._server.answer(request, asked, answer)
        if isinstance(response, EventStream):
            response.headers["content-type"] = MEDIA_TYPE
        return response

    async def _empty(self, question: OllamaRequest, *, chat: bool) -> Response:
        """A request without a prompt only loads the model, or with a keep_alive of 0 unloads it.

        Raises ApiError 503 if the model is not loaded.
        """
        question.refuse_unsupported()
        name = self._server.model_name(own_name(question.model))
        gone = question.keep_alive is not None and keep_seconds(question.keep_alive) == 0
        if not gone:
            await self._server.health.require()
        return JSONResponse(empty_line(name, chat=chat, done=True, done_reason="unload" if gone else "load"))


def _read(content: bytes, kind: type[OllamaRequest]) -> tuple[OllamaRequest, Asked | None]:
    """The request, and what it asks for."""
    question, notes = read_fields(content, kind)
    return question, question.asked([*notes, *question.unused])


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


def embed_routes(model: EmbeddingModel | None) -> list[Route]:
    """Without a model the routes say that there is none."""

    async def embed(request: Request) -> Response:
        question = await read_body(request, lambda content: decoded(content, _EmbedRequest))
        asked = named(model, own_name(question.model or question.name))
        inputs = [question.input] if isinstance(question.input, str) else question.input
        work = asked.embed(inputs, truncate=question.truncate, dimensions=question.dimensions)
        found = await unless_gone(request, work)
        return await asyncio.to_thread(_embeddings, asked.name, found)

    async def older_embeddings(request: Request) -> Response:
        question = await read_body(request, lambda content: decoded(content, _OlderRequest))
        asked = named(model, own_name(question.model or question.name))
        found = await unless_gone(request, asked.embed([question.prompt], truncate=True))
        return json_response({"embedding": list(found.vectors[0])})

    return [
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/embeddings", older_embeddings, methods=["POST"]),
    ]


def _embeddings(name: str, found: Embedded) -> Response:
    vectors = [list(vector) for vector in found.vectors]
    return json_response({"model": name, "embeddings": vectors, "prompt_eval_count": found.tokens})


_OPTIONS = {"repetition_penalty": "repeat_penalty"}
"""Sampling fields by Ollama's names, where it has others."""
_FOR_EVER = timedelta(days=365 * 100)
_VERSION = "0.12.6"
"""Of Ollama, whose API document these routes follow. Clients refuse a server that is older than what they need."""


@dataclass(frozen=True)
class CataloguedModel:
    """One model, under one of its names."""

    name: str
    folder: Path
    """Of the target."""
    loaded: bool
    context: int | None
    """Tokens; None until it is loaded."""
    bytes: int | None = None
    """Memory that it takes while it is loaded; None for the size of its weights."""
    left: Seconds | None = None
    """Until an idle model is unloaded; None for never."""
    embeds: bool = False
    """It computes embeddings, and generates nothing."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For fields that a request omits."""


def catalogued(model: EmbeddingModel) -> CataloguedModel:
    """An embedding model."""
    return CataloguedModel(model.name, model.folder, model.loaded, model.context, embeds=True)


class Catalogue(Protocol):
    async def catalogue(self) -> list[CataloguedModel]: ...

    def require(self, name: str | None) -> None:
        """Raises ApiError 404 for an unknown name."""
        ...


class _Named(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    """What older clients call it."""


class CatalogueRoutes:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/api/tags", self.tags),
            Route("/api/ps", self.running),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/version", self.version),
            Route("/api/v0/models", self.of_lm_studio),
        ]

    async def tags(self, request: Request) -> Response:
        found = await self._catalogue.catalogue()
        return JSONResponse({"models": [await asyncio.to_thread(_card, model) for model in found]})

    async def running(self, request: Request) -> Response:
        found = [model for model in await self._catalogue.catalogue() if model.loaded]
        return JSONResponse({"models": [await asyncio.to_thread(_running_card, model) for model in found]})

    async def show(self, request: Request) -> Response:
        named = decoded(await body(request), _Named)
        wanted = own_name(named.model or named.name)
        self._catalogue.require(wanted)
        found = await self._catalogue.catalogue()
        model = next((model for model in found if model.name == wanted), found[0])
        return JSONResponse(await asyncio.to_thread(_details, model))

    async def of_lm_studio(self, request: Request) -> Response:
        """The list of LM Studio's own API."""
        found = await self._catalogue.catalogue()
        return JSONResponse(
            {"object": "list", "data": [await asyncio.to_thread(_lm_studio_card, model) for model in found]}
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION, "launch_pipeline": version("launch-pipeline")})


def _card(model: CataloguedModel) -> dict[str, Any]:
    size, changed = ModelFolder(model.folder).size, _changed(model.folder)
    digest = hashlib.sha256(f"{model.folder.name} {size} {changed}".encode()).hexdigest()
    name = {"name": model.name, "model": model.name}
    return {**name, "modified_at": changed, "size": size, "digest": digest, "details": _kind(model.folder)}


def _running_card(model: CataloguedModel) -> dict[str, Any]:
    card = _card(model)
    left = _FOR_EVER if model.left is None else timedelta(seconds=min(model.left, _FOR_EVER.total_seconds()))
    size = model.bytes or card["size"]
    more = {"size": size, "size_vram": size, "context_length": model.context}
    return {**card, **more, "expires_at": (datetime.now(UTC) + left).isoformat()}


def _lm_studio_card(model: CataloguedModel) -> dict[str, Any]:
    kind = _kind(model.folder)
    longest = model.context or ModelFolder(model.folder).settings("config.json").get("max_position_embeddings")
    return {
        "id": model.name,
        "object": "model",
        "type": "embeddings" if model.embeds else "llm",
        "publisher": "launch-pipeline",
        "arch": kind["family"],
        "compatibility_type": "mlx",
        "quantization": kind["quantization_level"],
        "state": "loaded" if model.loaded else "not-loaded",
        "max_context_length": longest,
        "loaded_context_length": model.context,
        "capabilities": [] if model.embeds else ["tool_use"],
    }


def _details(model: CataloguedModel) -> dict[str, Any]:
    settings = ModelFolder(model.folder).settings("config.json")
    family = str(settings.get("model_type", ""))
    context = model.context or settings.get("max_position_embeddings")
    known = {"general.architecture": family, f"{family}.context_length": context}
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{_OPTIONS.get(name, name)} {value}" for name, value in model.sampling.items()),
        "template": "",
        "details": _kind(model.folder),
        "model_info": {name: value for name, value in known.items() if value},
        "capabilities": ["embedding"] if model.embeds else list(_capabilities(model.folder)),
        "modified_at": _changed(model.folder),
    }


@cache
def _capabilities(folder: Path) -> tuple[str, ...]:
    form = ChatPrompts(ChatTemplate(folder)).form
    return ("completion", "tools", *(("thinking",) if form.thinks else ()))


def _kind(folder: Path) -> dict[str, Any]:
    settings = ModelFolder(folder).settings("config.json")
    family, quantization = str(settings.get("model_type", "")), settings.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    number_format = str(settings.get("torch_dtype") or settings.get("dtype") or "")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": f"{bits}-bit" if bits else number_format,
    }


def _changed(folder: Path) -> str:
    file = folder / "config.json"
    stamp = file.stat().st_mtime if file.is_file() else 0.0
    return datetime.fromtimestamp(stamp, UTC).isoformat()
