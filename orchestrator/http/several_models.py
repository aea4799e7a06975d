"""Several models behind a server, each loaded when a request names it; and what the page shows of them.

Streams tell meanwhile why they wait, by events, not comments, because some clients count only events against their time
limit. Each is one that the API's clients ignore: a piece without text, a ping, a queued response.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.anthropic import waiting_ping
from orchestrator.http.errors import ApiError, internal_error
from orchestrator.http.generation import EventStream, WaitingStream
from orchestrator.http.live import Condition
from orchestrator.http.model_host import Lease, LoadedModel, ModelHost
from orchestrator.http.model_table import ModelName, ModelPhase, Seconds
from orchestrator.http.ollama.answer import empty_line, waiting_line
from orchestrator.http.ollama.request import keep_seconds, own_name
from orchestrator.http.ollama.routes import CHAT, GENERATE
from orchestrator.http.openai.answer import waiting_chunk
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.routes import CHATS
from orchestrator.http.request_bodies import decoded, read_body
from orchestrator.http.responses.answer import QueuedResponse
from orchestrator.http.server import OfferedModel
from orchestrator.http.work import unless_gone
from protocol.errors import PipelineError
from protocol.messages.base import RequestId
from protocol.messages.telemetry import TelemetryFrame

log = logging.getLogger(__name__)


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


_EMPTY = (b"", b"null", b"[]", b'""')


class Dispatch:
    """The endpoint of one route: passes a request on to the model that it names, once that is in memory."""

    def __init__(
        self,
        host: ModelHost,
        path: str,
        names: Callable[[str | None], ModelName],
        new_stream: Callable[[ModelName], WaitingStream] | None,
        patience: Seconds,
    ) -> None:
        """`names` raises ApiError 404 for an unknown name. `new_stream`: None for answers that are none.
        `patience`: seconds between two events of a stream that waits, and before the first one; within them the answer
        still has an HTTP status of its own."""
        self.path = path
        self._host = host
        self._names = names
        self._new_stream = new_stream
        self._patience = patience
        self._ollama = path in (CHAT, GENERATE)
        """Its clients name models by tags, may say how long they stay, and get a stream unless they want none."""

    async def answer(self, request: Request) -> Response:
        asked = await read_body(request, lambda content: decoded(content, ModelQuestion))
        name = self._names(own_name(asked.model or asked.name) if self._ollama else asked.model)
        if self._unloads(asked):
            self._host.keep(name, 0.0)
            return JSONResponse(empty_line(name, chat=self.path == CHAT, done=True, done_reason="unload"))
        streams = asked.stream is not False if self._ollama else asked.stream is True
        form = self._new_stream(name) if self._new_stream is not None and streams else None
        with ExitStack() as stack:
            lease = stack.enter_context(self._host.lease(name))
            model = await unless_gone(request, lease.model(None if form is None else self._patience))
            if model is not None:
                response = await self._answered(model, lease, asked, request)
                if isinstance(response, EventStream):
                    # It releases the lease once its text is generated: a client that reads slowly does not keep the
                    # model from being unloaded.
                    stack.pop_all()
                return response
            assert form is not None
            kept = stack.pop_all()
            return EventStream(self._streamed(lease, form, asked, request, kept), kept.close, form.media_type)

    def _unloads(self, asked: ModelQuestion) -> bool:
        """A request without a prompt that keeps its model for no time needs no model."""
        if not self._ollama or asked.keep_alive is None or keep_seconds(asked.keep_alive) != 0:
            return False
        return bytes(asked.messages if self.path == CHAT else asked.prompt).strip() in _EMPTY

    async def _answered(self, model: LoadedModel, lease: Lease, asked: ModelQuestion, request: Request) -> Response:
        if self._ollama and asked.keep_alive is not None:
            self._host.keep(lease.name, keep_seconds(asked.keep_alive))
        request.state.loading_seconds, request.state.on_generated = lease.seconds, lease.release
        return await model.endpoints[self.path](request)

    async def _streamed(
        self, lease: Lease, form: WaitingStream, asked: ModelQuestion, request: Request, stack: ExitStack
    ) -> AsyncIterator[bytes]:
        try:
            model = None
            while model is None:
                for event in form.waiting(lease.progress):
                    yield event
                model = await lease.model(self._patience)
            for name, value in form.state.items():
                setattr(request.state, name, value)
            response = await self._answered(model, lease, asked, request)
            if isinstance(response, EventStream):
                stack.callback(response.close)
                async for piece in response.frames:
                    yield piece
            else:
                yield bytes(response.body)
        except ClientDisconnect:
            return
        except ApiError as error:
            for event in form.failed(error):
                yield event
        except Exception:  # the border of a request: its status has been sent, so only an event can tell
            log.exception("a stream failed")
            for event in form.failed(internal_error()):
                yield event


_NONE = "No model is loaded: the next request loads one."


class LatestModel:
    """The pipeline of that model and its condition, as the live page needs them."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def check(self) -> Condition:
        latest = self._host.latest
        return Condition("loading", _NONE) if latest is None else await latest.server.health.check()

    async def watch(self, sequence: RequestId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        latest = self._host.latest
        if latest is None:
            raise PipelineError(_NONE)
        async with aclosing(latest.server.backend.watch(sequence)) as frames:
            async for frame in frames:
                if self._host.latest is not latest:
                    return
                yield frame


_FIRST_EVENT_SECONDS = 1.0
"""After which a stream that waits begins; an answer that begins earlier has an HTTP status of its own."""


class SeveralModels:
    """The models of a host, as `ServedModels` has them."""

    chats = True

    def __init__(self, host: ModelHost, offered: Sequence[OfferedModel], keep_alive: Seconds) -> None:
        """`keep_alive`: between two events of a stream that waits for its model."""
        self.offered = offered
        self.shown = self.health = LatestModel(host)
        self._host = host
        self._keep_alive = keep_alive

    def server(self, name: ModelName) -> ModelServer | None:
        model = self._host.loaded(name)
        return None if model is None else model.server

    def memory(self, name: ModelName) -> tuple[int | None, Seconds | None]:
        return self._host.status(name).entry.bytes, self._host.left(name)

    async def report(self) -> tuple[Condition, dict[str, Any]]:
        """Degraded if one of the models is."""
        told = {model.name: await self._told(model.name) for model in self.offered}
        failing = next((each for each in told.values() if each["status"] in ("failed", "degraded")), None)
        condition = Condition("ok") if failing is None else Condition("degraded", failing["reason"])
        return condition, {"waiting": self._host.waiting, "models": told}

    def stop(self) -> None:
        self._host.stop()

    async def _told(self, name: ModelName) -> dict[str, Any]:
        """One model's state for /health."""
        table, server = self._host.status(name), self.server(name)
        if server is not None:
            condition = await server.health.check()
            status, reason = condition.status, condition.reason
        elif table.phase is ModelPhase.ABSENT:
            status, reason = ("failed", table.failure) if table.failure else ("unloaded", "")
        else:
            status, reason = table.phase.value, self._host.doing(name)
        return {"status": status, "reason": reason, "running": len(table.running), "bytes": table.entry.bytes}

    def routes(self, names: Callable[[str | None], ModelName]) -> list[Route]:
        patience = min(_FIRST_EVENT_SECONDS, self._keep_alive)
        streams: dict[str, Callable[[ModelName], WaitingStream] | None] = {
            "/v1/completions": partial(waiting_chunk, "text"),
            **dict.fromkeys(CHATS, partial(waiting_chunk, "chat")),
            "/v1/responses": QueuedResponse,
            "/v1/messages": lambda _: waiting_ping(),
            **dict.fromkeys(("/v1/responses/input_tokens", "/v1/responses/compact", "/v1/messages/count_tokens")),
            **{path: partial(waiting_line, chat=path == CHAT) for path in (CHAT, GENERATE)},
        }
        endpoints = {path: Dispatch(self._host, path, names, stream, patience) for path, stream in streams.items()}
        return [Route(path, endpoint.answer, methods=["POST"]) for path, endpoint in endpoints.items()]
