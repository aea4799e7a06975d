"""Runs the HTTP server with several models."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import click
import uvicorn

from orchestrator.core.model_table import ModelEntry, ModelTable, Seconds
from orchestrator.http.access.admission_limit import AdmissionLimit
from orchestrator.http.models.host import ModelHost
from orchestrator.http.models.pipelines import ModelPipeline, PipelineLoader
from orchestrator.http.models.server import ModelsServer, OfferedModel
from orchestrator.http.monitoring.metrics import Metrics
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.run import greet, listener_of
from orchestrator.http.settings import ServerSettings
from protocol.descriptors import raise_descriptor_limit

_PAUSE_SECONDS = 30.0
"""After a model could not be loaded, until it is tried again."""


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """What all models together may take, and for how long."""

    room: int
    """Bytes."""
    keep: Seconds | None
    """How long a model without requests stays loaded; None for ever."""


def run_models(
    models: Sequence[tuple[ModelEntry, ModelPipeline]],
    memory: ModelMemory,
    settings: ServerSettings,
    listener: socket.socket,
    made: bool,
) -> None:
    """Until Ctrl-C. `models`: the first is the default. `made`: the server made the key itself."""
    raise_descriptor_limit()
    figures, store = Metrics(AdmissionLimit(settings.most_open)), ResponseStore()
    table = ModelTable(
        [entry for entry, _ in models],
        room=memory.room,
        keep=memory.keep,
        most_waiting=settings.most_open,
        pause=_PAUSE_SECONDS,
    )
    loader = PipelineLoader([pipeline for _, pipeline in models], settings, figures, store)
    host = ModelHost(table, loader)
    offered = [OfferedModel(entry.name, pipeline.target, pipeline.names[1:]) for entry, pipeline in models]
    api = ModelsServer(host, offered, settings, figures, store)
    server = listener_of(api.application(), api.stop, settings)
    greet(settings, listener, made)
    click.echo("Each model is loaded when a request names it. Ctrl-C ends it.")
    try:
        asyncio.run(_serve(server, listener, host))
    finally:
        loader.close()


async def _serve(server: uvicorn.Server, listener: socket.socket, host: ModelHost) -> None:
    host.start()
    await server.serve(sockets=[listener])
