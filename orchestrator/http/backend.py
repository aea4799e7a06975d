"""The server's own pipeline: its client, and the thread that starts it while the server already answers."""

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property

from orchestrator.api.async_client import AsyncClient, AsyncStream
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling.sampling_params import SamplingParams
from protocol.errors import PipelineError
from protocol.messages.base import SequenceId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame


class PipelineBackend:
    """The client of `pipeline`. Only `state` may be called before the pipeline is `ready`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.ready = False
        """The pipeline has started: from now on silence is a failure."""

    async def state(self) -> PipelineState | None:
        return await self._client.state() if self.ready else None

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> AsyncStream:
        return self._client.stream(prompt, params)

    def watch(self, sequence: SequenceId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        return self._client.watch(sequence)

    def close(self) -> None:
        if "_client" in self.__dict__:
            self._client.close()

    @cached_property
    def _client(self) -> AsyncClient:
        return AsyncClient(self._pipeline.address)


class PipelineThread(threading.Thread):
    """Starts a pipeline and waits for its end."""

    def __init__(
        self, pipeline: Pipeline, on_ready: Callable[[PipelineState], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._on_ready = on_ready
        self._on_end = on_end
        self.failure: PipelineError | None = None
        """Why the pipeline ended."""

    def run(self) -> None:
        try:
            self._on_ready(self._pipeline.start())
            self._pipeline.wait()
        except PipelineError as error:
            self.failure = error
        finally:
            self._on_end()
