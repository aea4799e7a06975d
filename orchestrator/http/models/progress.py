"""What a stream tells before its answer begins: why it waits, in the form of its API. Pure.

These are events, not comments, because some clients count only events against their time limit. Each is one that the
API's clients ignore: a piece without text, a ping, a queued response.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import msgspec

from orchestrator.http.errors import ApiError
from orchestrator.http.models.host import WaitingProgress
from orchestrator.http.ollama.answer import MEDIA_TYPE, empty_line, line
from orchestrator.http.renderer import frame

EVENTS = "text/event-stream"


class StreamForm(Protocol):
    """One stream's events before its answer."""

    media_type: str

    def waiting(self, progress: WaitingProgress) -> Iterator[bytes]: ...
    def failed(self, error: ApiError) -> Iterator[bytes]: ...

    @property
    def state(self) -> dict[str, Any]:
        """What the answer must know of these events."""
        ...


class ChunkForm:
    """Chat completions and completions: a chunk without text."""

    media_type = EVENTS

    def __init__(self, *, chat: bool) -> None:
        self.state: dict[str, Any] = {}
        self._object = "chat.completion.chunk" if chat else "text_completion"
        self._content: dict[str, Any] = {"delta": {"content": ""}} if chat else {"text": ""}
        self._id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    def waiting(self, progress: WaitingProgress) -> Iterator[bytes]:
        choice = {"index": 0, **self._content, "logprobs": None, "finish_reason": None}
        head = {"id": self._id, "object": self._object, "created": self._created, "model": progress.model}
        yield frame({**head, "choices": [choice], "loading": asdict(progress)})

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield frame(error.openai_body())


class PingForm:
    """Messages: a ping."""

    media_type = EVENTS

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def waiting(self, progress: WaitingProgress) -> Iterator[bytes]:
        yield frame({"type": "ping", "loading": asdict(progress)}, "ping")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield frame(error.anthropic_body(), "error")


class QueuedForm:
    """Responses: a created response that is queued. The answer continues its id and its numbers."""

    media_type = EVENTS

    def __init__(self) -> None:
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sent = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"response_id": self._id, "events_sent": self._sent}

    def waiting(self, progress: WaitingProgress) -> Iterator[bytes]:
        response = self._response(progress.model, "queued")
        if not self._sent:
            yield self._numbered({"type": "response.created", "response": response})
        yield self._numbered({"type": "response.queued", "response": response, "loading": asdict(progress)})

    def failed(self, error: ApiError) -> Iterator[bytes]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = {**self._response(None, "failed"), "error": {"code": code, "message": str(error)}}
        yield self._numbered({"type": "response.failed", "response": response})

    def _response(self, model: str | None, status: str) -> dict[str, Any]:
        head = {"id": self._id, "object": "response", "created_at": self._created, "model": model}
        asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {**head, **asked, "status": status, "error": None, "output": []}

    def _numbered(self, content: dict[str, Any]) -> bytes:
        self._sent += 1
        return frame({**content, "sequence_number": self._sent - 1}, content["type"])


class LineForm:
    """Ollama's chats and generations: a line without text."""

    media_type = MEDIA_TYPE

    def __init__(self, *, chat: bool) -> None:
        self.state: dict[str, Any] = {}
        self._chat = chat

    def waiting(self, progress: WaitingProgress) -> Iterator[bytes]:
        yield line(empty_line(progress.model, chat=self._chat, loading=asdict(progress)))

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield line(error.ollama_body())


def message_of(body: bytes) -> str:
    """The sentence in the body of an error, in whichever API's form."""
    try:
        error = msgspec.json.decode(body)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")
