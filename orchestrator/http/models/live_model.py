"""The live page of a server with several models shows the one that was used last."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from orchestrator.http.models.host import ModelHost
from orchestrator.http.monitoring.health import Condition, Health
from protocol.errors import PipelineError
from protocol.messages.base import SequenceId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame

_NONE = "No model is loaded: the next request loads one."


class LatestModel:
    """The pipeline of that model, as the live page needs it."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def state(self) -> PipelineState | None:
        latest = self._host.latest
        return None if latest is None else await latest.backend.state()

    async def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        latest = self._host.latest
        if latest is None:
            raise PipelineError(_NONE)
        async with aclosing(latest.backend.watch(sequence)) as frames:
            async for frame in frames:
                if self._host.latest is not latest:
                    return
                yield frame


class LatestModelHealth(Health):
    """The condition of that model."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(LatestModel(host))
        self._host = host

    async def check(self) -> Condition:
        latest = self._host.latest
        return Condition("loading", _NONE) if latest is None else await latest.server.condition()
