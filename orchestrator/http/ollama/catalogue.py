"""/api/tags, /api/ps, /api/show, /api/version: Ollama's list of the models, from their folders."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.core.models.events import Seconds
from orchestrator.http.access.disconnects import body
from orchestrator.http.embeddings.model import EmbeddingModel
from orchestrator.http.ollama.names import own_name
from orchestrator.http.prompts.chat_prompts import ChatPrompts
from orchestrator.http.request_bodies import decoded
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.text.chat_template import ChatTemplate

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

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION, "launch_pipeline": version("launch-pipeline")})


def _card(model: CataloguedModel) -> dict[str, Any]:
    size, changed = weight_bytes(model.folder), _changed(model.folder)
    digest = hashlib.sha256(f"{model.folder.name} {size} {changed}".encode()).hexdigest()
    name = {"name": model.name, "model": model.name}
    return {**name, "modified_at": changed, "size": size, "digest": digest, "details": _kind(model.folder)}


def _running_card(model: CataloguedModel) -> dict[str, Any]:
    card = _card(model)
    left = _FOR_EVER if model.left is None else timedelta(seconds=min(model.left, _FOR_EVER.total_seconds()))
    size = model.bytes or card["size"]
    more = {"size": size, "size_vram": size, "context_length": model.context}
    return {**card, **more, "expires_at": (datetime.now(UTC) + left).isoformat()}


def _details(model: CataloguedModel) -> dict[str, Any]:
    settings = _settings(model.folder)
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
    found = {"completion": True, "tools": form.knows_tools, "thinking": form.thinks}
    return tuple(name for name, there in found.items() if there)


def _kind(folder: Path) -> dict[str, Any]:
    settings = _settings(folder)
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


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def _changed(folder: Path) -> str:
    file = folder / "config.json"
    stamp = file.stat().st_mtime if file.is_file() else 0.0
    return datetime.fromtimestamp(stamp, UTC).isoformat()
