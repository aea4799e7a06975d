"""A pipeline with scripted output, for tests of the HTTP server alone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.api.result import Chosen, OnReading, Result
from orchestrator.api.sampling import SamplingParams
from protocol.errors import PipelineError
from protocol.messages.base import RequestId
from protocol.messages.client import PipelineState, Statistics
from protocol.messages.telemetry import TelemetryFrame

READY = PipelineState(
    session="s",
    ready=True,
    failure=None,
    blame="pipeline",
    target="t",
    draft="d",
    strategy="adaptive",
    context=256,
    vocabulary=1 << 16,
)


def statistics(prompt: int, generated: int) -> Statistics:
    return Statistics(
        prompt_tokens=prompt,
        generated_tokens=generated,
        elapsed=0.5,
        time_to_first_token=0.1,
        tokens_per_second=10.0,
        rounds=2,
        tokens_per_round=2.0,
        hit_rate=0.75,
        acceptance_rate=0.5,
        acceptance_by_depth=(0.5,),
        target_busy=0.9,
        draft_busy=0.8,
        wasted_draft_share=0.5,
        overhead_per_round=0.001,
        adopted_tokens=1,
        overlapped_rounds=2,
        draft_tokens=2,
        lookup_tokens=1,
    )


class FakeStream:
    """Yields its pieces; waits for ever at a None among them."""

    def __init__(self, pipeline: "FakePipeline", prompt: Sequence[int], params: SamplingParams) -> None:
        self._pipeline = pipeline
        self.request = f"request {len(pipeline.asked)}"
        self._prompt = prompt
        self._params = params
        self.result: Result | None = None
        self.chosen: list[Chosen] = []
        self._on_reading: OnReading = lambda *_: None

    def watch_reading(self, on_reading: OnReading) -> None:
        self._on_reading = on_reading

    async def __aiter__(self) -> AsyncIterator[str]:
        self._pipeline.running += 1
        try:
            for tokens, queued in self._pipeline.read:
                self._on_reading(tokens, len(self._prompt), queued)
            for piece in self._pipeline.pieces(self._params):
                if piece is None:
                    self._pipeline.stuck.set()
                    await asyncio.Event().wait()
                if isinstance(piece, PipelineError):
                    raise piece
                yield piece or ""
            said = "".join(piece for piece in self._pipeline.pieces(self._params) if isinstance(piece, str))
            figures = statistics(len(self._prompt), len(said))
            reason, stop = self._pipeline.ends
            self.result = self._pipeline.result or Result(said, (), reason, figures, self._params.seed or 0, stop)
        finally:
            self._pipeline.running -= 1
            if self.result is None:
                self._pipeline.cancelled.set()


@dataclass
class FakePipeline:
    pieces: Callable[[SamplingParams], Sequence[str | PipelineError | None]] = lambda _: ["Hel", "lo"]
    condition: PipelineState | None = READY
    asked: list[tuple[Sequence[int], SamplingParams]] = field(default_factory=list)
    ends: tuple[Literal["stop", "length"], str | None] = ("stop", None)
    """Why every generation ends, and by which stop string."""
    result: Result | None = None
    """Of every generation, in place of one that is made from the pieces."""
    read: Sequence[tuple[int, int]] = ()
    """Tokens of each prompt of which is told that they are read, and its place in the queue."""
    running: int = 0
    stuck: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    frames: Sequence[TelemetryFrame | PipelineError] = ()
    watched: list[RequestId | None] = field(default_factory=list)

    async def state(self) -> PipelineState | None:
        return self.condition

    async def watch(self, sequence: RequestId | None = None) -> AsyncGenerator[TelemetryFrame, None]:
        """Its frames, then nothing for ever."""
        self.watched.append(sequence)
        for frame in self.frames:
            if isinstance(frame, PipelineError):
                raise frame
            yield frame
        await asyncio.Event().wait()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> FakeStream:
        self.asked.append((prompt, params))
        return FakeStream(self, prompt, params)
