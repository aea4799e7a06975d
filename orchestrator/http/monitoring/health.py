"""How the pipeline behind the server is; asked at most a few times a second, however many want to know."""

import asyncio
import time
from dataclasses import dataclass
from typing import Literal, Protocol

from orchestrator.http.errors import ApiError
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState

_FRESH = 0.25
"""Seconds that an answer is good for."""


class Knowing(Protocol):
    async def state(self) -> PipelineState | None:
        """None while there is nobody to ask yet."""
        ...


@dataclass(frozen=True)
class Condition:
    status: Literal["ok", "loading", "degraded", "failed"]
    reason: str = ""
    state: PipelineState | None = None

    @property
    def serving(self) -> PipelineState | None:
        """What requests need to know, if they can be served, perhaps slower."""
        return self.state if self.status in ("ok", "degraded") else None


class Health:
    """Asks `pipeline`, and remembers the answer for a moment."""

    def __init__(self, pipeline: Knowing) -> None:
        self._pipeline = pipeline
        self._known: Condition | None = None
        self._until = 0.0
        self._asking: asyncio.Task[Condition] | None = None

    async def look(self) -> Condition:
        if self._known is not None and time.monotonic() < self._until:
            return self._known
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        # Whoever waits may go away; the others still want to know.
        return await asyncio.shield(self._asking)

    async def require(self) -> PipelineState:
        """Raises ApiError 503 while requests can't be served."""
        condition = await self.look()
        if condition.serving is None:
            raise ApiError(503, condition.reason, code=condition.status, headers={"retry-after": "5"})
        return condition.serving

    async def _ask(self) -> Condition:
        try:
            self._known = condition(await self._pipeline.state())
        except PipelineError as error:
            self._known = Condition("failed", str(error))
        finally:
            self._asking = None
        self._until = time.monotonic() + _FRESH
        return self._known


def condition(state: PipelineState | None) -> Condition:
    """What a state means for those who ask for text."""
    if state is not None and state.failure is not None:
        return Condition("failed", state.failure)
    if state is None or not state.ready:
        return Condition("loading", "The models are still being loaded: try again in a moment.")
    if "target" in state.down:
        return Condition("degraded", "The target is being restarted: requests wait for it and lose nothing.", state)
    if state.down:
        roles = " and ".join(state.down)
        return Condition("degraded", f"No {roles} worker is up: requests go on without it, and slower.", state)
    return Condition("ok", state=state)
