"""The condition of the pipeline, asked from it at most four times a second, and its telemetry as server-sent events."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from orchestrator.http.errors import RETRY_SECONDS, ApiError, of_pipeline
from orchestrator.http.generation import COMMENT, EventStream, frame
from protocol.errors import PipelineError
from protocol.messages.base import RequestId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame
from protocol.shown_names import model_name

_CACHE_SECONDS = 0.25
"""How long an answer is reused."""

LOADING = "The models are still being loaded: try again in a moment."


class StateSource(Protocol):
    async def state(self) -> PipelineState | None:
        """None while the pipeline is being started."""
        ...


@dataclass(frozen=True)
class Condition:
    status: Literal["ok", "loading", "degraded", "failed"]
    reason: str = ""
    state: PipelineState | None = None

    @property
    def serving(self) -> PipelineState | None:
        """The pipeline's state if it serves requests, perhaps more slowly; else None."""
        return self.state if self.status in ("ok", "degraded") else None


class Checkable(Protocol):
    async def check(self) -> Condition: ...


class Health:
    """Asks `pipeline`, and reuses its answer for a short time."""

    def __init__(self, pipeline: StateSource) -> None:
        self._pipeline = pipeline
        self._cached: Condition | None = None
        self._valid_until = 0.0
        self._pending: asyncio.Task[Condition] | None = None

    async def check(self) -> Condition:
        if self._cached is not None and time.monotonic() < self._valid_until:
            return self._cached
        if self._pending is None:
            self._pending = asyncio.create_task(self._ask())
        # Several requests share the task: one that is cancelled must not cancel it for the others.
        return await asyncio.shield(self._pending)

    async def require(self) -> PipelineState:
        """The state of a pipeline that serves requests. Raises ApiError 503 if it does not."""
        condition = await self.check()
        if condition.serving is None:
            raise ApiError(503, condition.reason, code=condition.status, retry=RETRY_SECONDS)
        return condition.serving

    async def _ask(self) -> Condition:
        try:
            self._cached = condition(await self._pipeline.state())
        except PipelineError as error:
            self._cached = Condition("failed", str(of_pipeline(error)))
        finally:
            self._pending = None
        self._valid_until = time.monotonic() + _CACHE_SECONDS
        return self._cached


def condition(state: PipelineState | None) -> Condition:
    """The condition that clients of the server see, from the pipeline's state."""
    if state is not None and state.failure is not None:
        return Condition("failed", state.failure)
    if state is None or not state.ready:
        return Condition("loading", LOADING)
    if not state.context:
        return Condition("loading", "No target has joined yet: run `launch-pipeline attach target` on its machine.")
    if "target" in state.down:
        return Condition("degraded", "The target is being restarted: requests wait for it and lose no token.", state)
    if state.down:
        roles = " and ".join(state.down)
        return Condition("degraded", f"No {roles} worker is up: requests continue without it, more slowly.", state)
    return Condition("ok", state=state)


MAX_SUBSCRIBERS = 8
_RETRY_SECONDS = 0.5
"""Between two attempts to read telemetry from a pipeline that gives none."""
_HEALTH_SECONDS = 1.0
"""Between two health checks."""

T = TypeVar("T")


class Watchable(Protocol):
    def watch(self, sequence: RequestId | None = None) -> AsyncGenerator[TelemetryFrame, None]: ...


class Live:
    """`GET /v1/pipeline/events`: `hello` once, `status` at first and when it changes, then `frame`s.

    The next frame is requested when the client has taken the last one, so a slow client misses frames.
    """

    def __init__(self, pipeline: Watchable, health: Checkable, facts: Mapping[str, Any]) -> None:
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

    async def _events(self, wanted: RequestId | None) -> AsyncIterator[bytes]:
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


def _wanted(text: str | None) -> RequestId | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, "`request` is the number of a request, as in telemetry frames.", param="request")
    return RequestId(int(text))
