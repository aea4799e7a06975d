"""Settings of the HTTP server. Loads no library of it."""

import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.http.model_table import Seconds
from orchestrator.machine.sampling_defaults import model_sampling


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What one client can hold of a server's connections, and for how long."""

    most: int = 512
    """Connections at once; beyond that, requests are answered with 503."""
    head_seconds: float = 10.0
    """For a request's line and headers."""
    body_seconds: float = 30.0
    rest_seconds: float = 5.0
    """For the rest of a body that was answered before its end."""
    write_seconds: float = 30.0
    """For the next piece of an answer that the client reads."""
    idle_seconds: int = 30
    """Between an answer and the next request."""

    def within(self, descriptors: int) -> "ConnectionLimits":
        """So few that a process with so many descriptors keeps some: without one it can neither accept a connection
        nor close it, and logs an error each time."""
        return replace(self, most=min(self.most, descriptors // 2))


@dataclass(frozen=True)
class EmbeddingCommand:
    """What runs the program of an embedding model, and with what."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, beyond our own."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """An embedding model beside the models that generate."""

    name: str
    folder: Path
    command: EmbeddingCommand
    keep: Seconds | None = None
    """How long its process stays without a request; None for ever."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the command line decides."""

    names: tuple[str, ...]
    """Names that requests may give the model; the first is the default."""
    key: str | None = None
    hosts: tuple[str, ...] = ()
    """Host names that requests may carry."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests from a browser (CORS)."""
    most_open: int = 64
    """Choices generated at once."""
    most_bytes: int = 8 << 20
    """The largest body of a request."""
    connections: ConnectionLimits = ConnectionLimits()
    keep_alive: float = 5.0
    """Seconds without an event after which a stream sends a keep-alive."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values for fields that a request omits, before the model's own."""
    embedding: EmbeddingSettings | None = None

    def sampling_defaults(self, target: Path) -> Mapping[str, Any]:
        """Of the model in this folder, for fields that a request omits."""
        return {**msgspec.structs.asdict(model_sampling(target)), **self.defaults}


def fresh_key() -> str:
    return f"lp-{secrets.token_urlsafe(32)}"


def loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
