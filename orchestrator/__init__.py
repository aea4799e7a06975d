"""The orchestrator: runs the state machine with its speculation caches, starts the workers, serves clients.

Imports neither worker, and no MLX except in the bench's own processes. The names below are the Python interface.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api.async_client import AsyncClient
    from orchestrator.api.client import Client, Stream
    from orchestrator.api.llm import LLM, ResultEvent, TextEvent
    from orchestrator.api.pipeline import Pipeline
    from orchestrator.api.result import Result
    from orchestrator.api.sampling import SamplingParams
    from orchestrator.api.settings import PipelineSettings
    from protocol.errors import InputError, PipelineError

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "InputError",
    "Pipeline",
    "PipelineError",
    "PipelineSettings",
    "Result",
    "ResultEvent",
    "SamplingParams",
    "Stream",
    "TextEvent",
]

_HOMES = {
    "LLM": "orchestrator.api.llm",
    "AsyncClient": "orchestrator.api.async_client",
    "Client": "orchestrator.api.client",
    "InputError": "protocol.errors",
    "Pipeline": "orchestrator.api.pipeline",
    "PipelineError": "protocol.errors",
    "PipelineSettings": "orchestrator.api.settings",
    "Result": "orchestrator.api.result",
    "ResultEvent": "orchestrator.api.llm",
    "SamplingParams": "orchestrator.api.sampling",
    "Stream": "orchestrator.api.client",
    "TextEvent": "orchestrator.api.llm",
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: a command must handle Ctrl-C before it imports much."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
