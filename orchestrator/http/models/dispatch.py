"""Passes a request on to the model that it names, once that is in memory; streams tell meanwhile why they wait.

They tell it by events, not comments, because some clients count only events against their time limit. Each is one that
the API's clients ignore: a piece without text, a ping, a queued response.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from orchestrator.http.access.disconnects import body, unless_gone
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import WaitingStream
from orchestrator.http.model_table import ModelName, Seconds
from orchestrator.http.models.host import Lease, LoadedModel, ModelHost
from orchestrator.http.request_bodies import decoded, read_content


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
        new_stream: Callable[[ModelName], WaitingStream] | None,
        patience: Seconds,
    ) -> None:
        """`name_of` raises ApiError 404 for an unknown name. `new_stream`: None for answers that are none.
        `patience`: seconds between two events of a stream that waits, and before the first one; within them the answer
        still has an HTTP status of its own."""
        self._host = host
        self._name_of = name_of
        self._new_stream = new_stream
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
            form = self._new_stream(name) if self._new_stream is not None and self._streams(asked) else None
            model = await unless_gone(request, lease.model(None if form is None else self._patience))
            if model is not None:
                await self._pass_on(model, lease, asked, request, content, send)
            elif form is not None:
                await self._streamed(lease, form, asked, request, content, send)

    def _streams(self, asked: ModelQuestion) -> bool:
        return asked.stream is True

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
        self, lease: Lease, form: WaitingStream, asked: ModelQuestion, request: Request, content: bytes, send: Send
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

    async def _told(self, request: Request, lease: Lease, stream: "_OpenStream", form: WaitingStream) -> LoadedModel:
        while True:
            for event in form.waiting(asdict(lease.progress)):
                await stream.write(event)
            model = await unless_gone(request, lease.model(self._patience))
            if model is not None:
                return model


class _OpenStream:
    """A response that has begun before its model was there. What the model sends goes on in it."""

    def __init__(self, send: Send, form: WaitingStream) -> None:
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
