"""The pipeline as it works, told as server-sent events for as long as somebody reads them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import ExitStack, aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from orchestrator.http.errors import ApiError
from orchestrator.http.monitoring.health import Condition, Health
from orchestrator.http.renderer import COMMENT, frame
from orchestrator.http.streaming import EventStream
from protocol.errors import PipelineError
from protocol.messages.base import SequenceId
from protocol.messages.telemetry import TelemetryFrame

MOST_WATCHERS = 8
_AGAIN_SECONDS = 0.5
"""Until a pipeline that can't be watched is looked at again."""
_CONDITION_EVERY = 1.0
"""Seconds between two looks at how the pipeline is."""

T = TypeVar("T")


class Watchable(Protocol):
    def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]: ...


class Live:
    """`GET /v1/pipeline/events`: `hello` once, `status` at first and when it changes, `scene` as they come.

    A reader that is slow is asked nothing of: it holds back its own next scene, and misses some.
    """

    def __init__(self, pipeline: Watchable, health: Health, facts: Mapping[str, Any]) -> None:
        """`facts`: what `hello` says."""
        self._pipeline = pipeline
        self._health = health
        self._facts = dict(facts)
        self._watchers = 0
        self._stopped = asyncio.Event()

    async def events(self, request: Request) -> EventStream:
        wanted = _wanted(request.query_params.get("request"))
        if self._watchers >= MOST_WATCHERS:
            raise ApiError(429, f"{MOST_WATCHERS} pages watch already: close one of them.", code="too_many_watchers")
        self._watchers += 1
        stack = ExitStack()
        stack.callback(self._leave)
        return EventStream(self._frames(wanted), stack.close)

    def stop(self) -> None:
        """The server ends: so do the streams."""
        self._stopped.set()

    def _leave(self) -> None:
        self._watchers -= 1

    async def _frames(self, wanted: SequenceId | None) -> AsyncIterator[bytes]:
        yield frame(self._facts, "hello")
        told: Condition | None = None
        while not self._stopped.is_set():
            condition = await self._health.look()
            if condition != told:
                told = condition
                yield frame(_told(condition), "status")
            if condition.serving is None:
                await self._unless_stopped(asyncio.sleep(_AGAIN_SECONDS))
                # Who went away is noticed by what is sent.
                yield COMMENT
                continue
            try:
                async with aclosing(self._pipeline.watch(wanted)) as scenes:
                    async for scene in self._while(condition, scenes):
                        yield b"event: scene\ndata: " + msgspec.json.encode(scene) + b"\n\n"
            except PipelineError:
                # What is wrong is told by the next look.
                await self._unless_stopped(asyncio.sleep(_AGAIN_SECONDS))

    async def _while(
        self, condition: Condition, scenes: AsyncIterator[TelemetryFrame]
    ) -> AsyncIterator[TelemetryFrame]:
        """Those that come while the pipeline is as it was, looked at about once a second."""
        clock = asyncio.get_running_loop().time
        looked_at = clock()
        while True:
            scene = await self._unless_stopped(anext(scenes, None))
            if scene is None:
                return
            yield scene
            if clock() - looked_at >= _CONDITION_EVERY:
                looked_at = clock()
                if await self._health.look() != condition:
                    return

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The work's result, or None as soon as the server ends."""
        working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            stopped.cancel()
            if working.cancel():
                # What it holds is let go of before anybody closes what it came from.
                await asyncio.wait({working})


def _told(condition: Condition) -> dict[str, Any]:
    told: dict[str, Any] = {"status": condition.status, "reason": condition.reason}
    if condition.state is not None:
        state = condition.state
        told |= {"strategy": state.strategy, "context": state.context, "lost": state.lost, "down": state.down}
        told |= {"target": state.target.rsplit("/", 1)[-1], "draft": state.draft.rsplit("/", 1)[-1]}
    return told


def _wanted(text: str | None) -> SequenceId | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, "`request` is the number of a request, as scenes tell it.", param="request")
    return SequenceId(int(text))
