"""The pipeline's telemetry as server-sent events, for as long as the client reads them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import ExitStack, aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from orchestrator.http.errors import ApiError
from orchestrator.http.generation import COMMENT, EventStream, frame
from orchestrator.http.monitoring.health import Condition, Health
from protocol.errors import PipelineError
from protocol.messages.base import SequenceId
from protocol.messages.telemetry import TelemetryFrame
from protocol.shown_names import model_name

MAX_SUBSCRIBERS = 8
_RETRY_SECONDS = 0.5
"""Between two attempts to read telemetry from a pipeline that gives none."""
_HEALTH_SECONDS = 1.0
"""Between two health checks."""

T = TypeVar("T")


class Watchable(Protocol):
    def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]: ...


class Live:
    """`GET /v1/pipeline/events`: `hello` once, `status` at first and when it changes, then `frame`s.

    The next frame is requested when the client has taken the last one, so a slow client misses frames.
    """

    def __init__(self, pipeline: Watchable, health: Health, facts: Mapping[str, Any]) -> None:
        """`facts` is the content of `hello`."""
        self._pipeline = pipeline
        self._health = health
        self._facts = dict(facts)
        self._subscribers = 0
        self._stopped = asyncio.Event()

    async def events(self, request: Request) -> EventStream:
        wanted = _wanted(request.query_params.get("request"))
        if self._subscribers >= MAX_SUBSCRIBERS:
            raise ApiError(
                429, f"{MAX_SUBSCRIBERS} pages are open already: close one of them.", code="too_many_watchers"
            )
        self._subscribers += 1
        stack = ExitStack()
        stack.callback(self._leave)
        return EventStream(self._events(wanted), stack.close)

    def stop(self) -> None:
        """End all streams: the server ends."""
        self._stopped.set()

    def _leave(self) -> None:
        self._subscribers -= 1

    async def _events(self, wanted: SequenceId | None) -> AsyncIterator[bytes]:
        yield frame(self._facts, "hello")
        sent: Condition | None = None
        while not self._stopped.is_set():
            condition = await self._health.check()
            if condition != sent:
                sent = condition
                yield frame(_status(condition), "status")
            if condition.serving is None:
                await self._unless_stopped(asyncio.sleep(_RETRY_SECONDS))
                # Only a write shows that the client has gone.
                yield COMMENT
                continue
            try:
                async with aclosing(self._pipeline.watch(wanted)) as telemetry:
                    async for one in self._while(condition, telemetry):
                        yield b"event: frame\ndata: " + msgspec.json.encode(one) + b"\n\n"
            except PipelineError:
                # The next health check reports the cause.
                await self._unless_stopped(asyncio.sleep(_RETRY_SECONDS))

    async def _while(
        self, condition: Condition, telemetry: AsyncIterator[TelemetryFrame]
    ) -> AsyncIterator[TelemetryFrame]:
        """The frames until the pipeline's condition changes, which is checked about once a second."""
        clock = asyncio.get_running_loop().time
        checked_at = clock()
        while True:
            one = await self._unless_stopped(anext(telemetry, None))
            if one is None:
                return
            yield one
            if clock() - checked_at >= _HEALTH_SECONDS:
                checked_at = clock()
                if await self._health.check() != condition:
                    return

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None as soon as the server ends."""
        working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            stopped.cancel()
            if working.cancel():
                # The cancelled work must release its socket before the generator that it reads is closed.
                await asyncio.wait({working})


def _status(condition: Condition) -> dict[str, Any]:
    content: dict[str, Any] = {"status": condition.status, "reason": condition.reason}
    if condition.state is not None:
        state = condition.state
        content |= {"strategy": state.strategy, "context": state.context, "lost": state.lost, "down": state.down}
        content |= {"level": state.level}
        content |= {"target": model_name(state.target), "draft": model_name(state.draft)}
    return content


def _wanted(text: str | None) -> SequenceId | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, "`request` is the number of a request, as in telemetry frames.", param="request")
    return SequenceId(int(text))
