"""Passes a request on to the model that it names, once that is in memory; streams tell meanwhile why they wait.

They tell it by events, not comments, because some clients count only events against their time limit. Each is one that
the API's clients ignore: a piece without text, a ping, a queued response.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from orchestrator.http.access.disconnects import body, unless_gone
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import frame
from orchestrator.http.model_table import ModelName, Seconds
from orchestrator.http.models.host import Lease, LoadedModel, ModelHost, WaitingProgress
from orchestrator.http.ollama.answer import MEDIA_TYPE, empty_line, line
from orchestrator.http.request_bodies import decoded, read_content

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


class ModelQuestion(msgspec.Struct):
    """What the server must know of a request before its model is there."""

    model: str | None = None
    stream: Any = None
    name: str | None = None
    """What older clients of Ollama's call the model."""
    keep_alive: Any = None
    """Ollama's."""
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


class Dispatch:
    """The endpoint of one route that models answer. An ASGI application."""

    def __init__(
        self,
        host: ModelHost,
        name_of: Callable[[ModelQuestion], ModelName],
        new_form: Callable[[ModelQuestion], StreamForm | None],
        patience: Seconds,
    ) -> None:
        """`name_of` raises ApiError 404 for an unknown name. `new_form`: of the answer's stream, None if it is none.
        `patience`: seconds between two events of a stream that waits, and before the first one; within them the answer
        still has an HTTP status of its own."""
        self._host = host
        self._name_of = name_of
        self._new_form = new_form
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        content = await body(request)
        asked = await read_content(request, content, lambda content: decoded(content, ModelQuestion))
        name = self._name_of(asked)
        early = self._early(name, asked)
        if early is not None:
            await early(scope, receive, send)
            return
        with self._host.lease(name) as lease:
            form = self._new_form(asked)
            model = await unless_gone(request, lease.model(None if form is None else self._patience))
            if model is not None:
                await self._pass_on(model, lease, asked, request, content, send)
            elif form is not None:
                await self._streamed(lease, form, asked, request, content, send)

    def _early(self, name: ModelName, asked: ModelQuestion) -> Response | None:
        """The answer to a request that needs no model."""
        return None

    def _admitted(self, name: ModelName, asked: ModelQuestion) -> None:
        """The model is there for the request."""

    async def _pass_on(
        self,
        model: LoadedModel,
        lease: Lease,
        asked: ModelQuestion,
        request: Request,
        content: bytes,
        send: Send,
        **state: Any,
    ) -> None:
        """`state`: what the answer must know of the events before it."""
        self._admitted(lease.name, asked)
        # A client that reads slowly does not keep the model from being unloaded.
        told = {"loading_seconds": lease.seconds, "on_generated": lease.release, **state}
        known = {**request.scope.get("state", {}), **told}
        await model.app({**request.scope, "state": known}, _replayed(content, request.receive), send)

    async def _streamed(
        self, lease: Lease, form: StreamForm, asked: ModelQuestion, request: Request, content: bytes, send: Send
    ) -> None:
        stream = _OpenStream(send, form)
        await stream.open()
        try:
            model = await self._told(request, lease, stream, form)
            await self._pass_on(model, lease, asked, request, content, stream.send, **form.state)
        except ApiError as error:
            await stream.fail(error)
        except ClientDisconnect:
            return
        await stream.close()

    async def _told(self, request: Request, lease: Lease, stream: "_OpenStream", form: StreamForm) -> LoadedModel:
        while True:
            for event in form.waiting(lease.progress):
                await stream.write(event)
            model = await unless_gone(request, lease.model(self._patience))
            if model is not None:
                return model


class _OpenStream:
    """A response that has begun before its model was there. What the model sends goes on in it."""

    def __init__(self, send: Send, form: StreamForm) -> None:
        self._send = send
        self._form = form
        self._status = 200
        self._refusal = b""
        self._closed = False

    async def open(self) -> None:
        headers = [(b"content-type", self._form.media_type.encode()), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, event: bytes) -> None:
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def send(self, message: Message) -> None:
        """As ASGI's `send` of the model's own response; the body of a refusal becomes the stream's error."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            self._closed = not message.get("more_body", False)
            await self._send(message)
        else:
            self._refusal += message.get("body", b"")
            if not message.get("more_body", False):
                await self.fail(ApiError(self._status, message_of(self._refusal)))

    async def fail(self, error: ApiError) -> None:
        for event in self._form.failed(error):
            await self.write(event)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _replayed(content: bytes, receive: Receive) -> Receive:
    """Receives a body that was read before, then what comes next."""
    coming: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def replay() -> Message:
        return coming.pop() if coming else await receive()

    return replay
