"""The interface by which each API renders its responses, and the format of server-sent events. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import OutputEvent, Reading

COMMENT = b": keep-alive\n\n"
"""A server-sent event that clients skip."""


class Renderer(Protocol):
    """Renders one response of one API: as one object, or as server-sent events."""

    def idle(self) -> bytes:
        """The event that keeps a stream alive while nothing is generated."""
        ...

    def reading(self, event: Reading) -> bytes:
        """An event while the prompt is read, which clients take for a sign of life."""
        ...

    def whole(self, results: Sequence[Result]) -> dict[str, Any]: ...

    def opening(self) -> Iterable[bytes]:
        """Events before the first text."""
        ...

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        """Events for a piece of text or for the end of a choice."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Events for an error after the HTTP status was sent."""
        ...

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        """Events after the end of all choices."""
        ...


def frame(content: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"
