"""The pipeline behind the server: its client, and the thread that waits for it while the server already answers."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property
from typing import Protocol

from orchestrator.api.async_client import AsyncClient, AsyncStream
from orchestrator.api.client import BUSY_ANSWER_SECONDS, Client
from orchestrator.api.pipeline import OrchestratorEnded
from orchestrator.api.sampling import SamplingParams
from orchestrator.runtime.restarts import RestartPolicy
from protocol.errors import PipelineError, blaming
from protocol.messages.base import RequestId
from protocol.messages.client import PipelineState
from protocol.messages.telemetry import TelemetryFrame

log = logging.getLogger(__name__)
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ready = False
        """The pipeline has started: from now on silence is a failure."""

    async def state(self) -> PipelineState | None:
        return await self._client.state() if self.ready else None

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> AsyncStream:
        return self._client.stream(prompt, params)

    def watch(self, sequence: RequestId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        return self._client.watch(sequence)

    def restarting(self) -> None:
        """From any thread: the pipeline has ended and will start again. Requests in progress end with PipelineError."""
        self.ready = False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @cached_property
    def _client(self) -> AsyncClient:
        self._loop = asyncio.get_running_loop()
        return AsyncClient(self._pipeline.address)


class PipelineThread(threading.Thread):
    """Starts a pipeline and waits for its end."""

    def __init__(
        self,
        pipeline: ServedPipeline,
        on_ready: Callable[[PipelineState], None],
        on_end: Callable[[], None],
        on_restart: Callable[[str], None] | None = None,
    ) -> None:
        """With `on_restart`, a pipeline that was ready and whose orchestrator is killed starts again, as often as a
        worker would. It is called before that, with the orchestrator's last words."""
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._on_ready = on_ready
        self._on_end = on_end
        self._on_restart = on_restart
        self._left = threading.Event()
        self.failure: PipelineError | None = None
        """Why the pipeline ended."""

    def leave(self) -> None:
        """Nothing starts again: the server ends."""
        self._left.set()

    def run(self) -> None:
        try:
            self._live()
        except PipelineError as error:
            self.failure = error
        except Exception as error:  # the border of a thread: those that wait for the pipeline learn why it ended
            log.exception("a pipeline failed")
            self.failure = PipelineError(f"The pipeline failed ({error}): the log has the cause.")
        finally:
            self._on_end()

    def _live(self) -> None:
        deaths, ready = RestartPolicy(), False
        while True:
            try:
                state = self._pipeline.start()
                if state.ready:
                    self._on_ready(state)
                    ready = True
                return self._pipeline.wait()
            except OrchestratorEnded as error:
                delay = deaths.died(time.monotonic()) if ready else None
                if self._on_restart is None or delay is None or self._left.is_set():
                    raise
                self._on_restart(error.last_words)
                self._pipeline.close()
                if self._left.wait(delay):
                    raise
