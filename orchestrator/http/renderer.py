"""What every API that is answered here has to say about its answers. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import OutputEvent

COMMENT = b": keep-alive\n\n"
"""What readers of server-sent events skip."""


class Renderer(Protocol):
    """One answer as the clients of one API read it: whole, or as frames of a stream."""

    @property
    def idle(self) -> bytes:
        """What says that a stream lives, while nothing is generated."""
        ...

    def whole(self, results: Sequence[Result]) -> dict[str, Any]: ...

    def opening(self) -> Iterable[bytes]:
        """Before the first text."""
        ...

    def told(self, event: OutputEvent) -> Iterable[bytes]:
        """What an event is to the client."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Instead of the rest: the status has gone out already."""
        ...

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        """When all choices have ended."""
        ...


def frame(content: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"
