"""What the server's owner decides. Loads nothing."""

import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the server's owner decides."""

    names: tuple[str, ...]
    """What the model may be called; the first is what it is called if the client says nothing."""
    key: str | None = None
    hosts: tuple[str, ...] = ()
    """Names of this machine that requests may be addressed to."""
    origins: tuple[str, ...] = ()
    """Web pages that may ask from a browser."""
    most_open: int = 64
    """Generations at once."""
    most_bytes: int = 8 << 20
    """Of a request's body."""
    keep_alive: float = 5.0
    """Seconds without anything to say after which a stream says that it lives."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    """For what requests leave open."""


def fresh_key() -> str:
    return f"lp-{secrets.token_urlsafe(32)}"


def loopback(host: str) -> bool:
    """Whether only this machine reaches a server there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
