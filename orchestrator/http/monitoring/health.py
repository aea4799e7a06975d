"""The condition of the pipeline behind the server, asked from it at most four times a second."""

import asyncio
import time
from dataclasses import dataclass
from typing import Literal, Protocol

from orchestrator.http.errors import ApiError, of_pipeline
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState

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
            raise ApiError(503, condition.reason, code=condition.status, headers={"retry-after": "5"})
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
