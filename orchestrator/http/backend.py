"""The pipeline behind the server: its client, and the thread that waits for it while the server already answers."""

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property
from typing import Protocol

import structlog

from orchestrator.api.async_client import AsyncClient, AsyncStream
from orchestrator.api.client import BUSY_ANSWER_SECONDS, Client
from orchestrator.api.sampling import SamplingParams
from protocol.errors import PipelineError, blaming
from protocol.messages.base import SequenceId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame

log = structlog.get_logger()
_CHECK_SECONDS = 2.0
"""Between two questions whether another program's pipeline still runs."""


class ServedPipeline(Protocol):
    """A pipeline of this program, or of another one."""

    @property
    def address(self) -> str: ...
    def start(self) -> PipelineState:
        """Wait until it is ready, or `close` is called. Raises PipelineError if it fails."""
        ...

    def wait(self) -> None:
        """Until it ends; raises PipelineError saying why."""
        ...

    def close(self) -> None: ...


class RunningPipeline:
    """A pipeline of another program, which `close` leaves as it is."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._left = threading.Event()

    @property
    def address(self) -> str:
        return self._client.address

    def start(self) -> PipelineState:
        while True:
            state = self._state()
            if state.ready or self._left.wait(_CHECK_SECONDS):
                return state

    def wait(self) -> None:
        while not self._left.wait(_CHECK_SECONDS):
            self._state()

    def close(self) -> None:
        self._left.set()

    def _state(self) -> PipelineState:
        state = self._client.state(BUSY_ANSWER_SECONDS)
        if state.failure is not None:
            raise blaming(state.blame, state.failure)
        return state


class PipelineBackend:
    """The client of `pipeline`. Only `state` may be called before the pipeline is `ready`."""

    def __init__(self, pipeline: ServedPipeline) -> None:
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
        self, pipeline: ServedPipeline, on_ready: Callable[[PipelineState], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._on_ready = on_ready
        self._on_end = on_end
        self.failure: PipelineError | None = None
        """Why the pipeline ended."""

    def run(self) -> None:
        try:
            state = self._pipeline.start()
            if state.ready:
                self._on_ready(state)
            self._pipeline.wait()
        except PipelineError as error:
            self.failure = error
        except Exception as error:  # the border of a thread: those that wait for the pipeline learn why it ended
            log.exception("a pipeline failed")
            self.failure = PipelineError(f"The pipeline failed ({error}): the log has the cause.")
        finally:
            self._on_end()
