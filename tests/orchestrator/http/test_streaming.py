"""Laws of streams: no client waits for long without a sign of life."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from orchestrator.api.result import Chosen, OnReading, Result
from orchestrator.http.generation import ChoiceEnd, ChoiceStream, OutputEvent, TextPiece
from orchestrator.http.streaming import frames
from tests.support.fake_pipeline import statistics

PATIENCE = 0.05


class SlowCall:
    """The text of a call, piece by piece."""

    result: Result | None = None
    chosen: Sequence[Chosen] = ()

    def watch_reading(self, on_reading: OnReading) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[str]:
        for _ in range(20):
            await asyncio.sleep(PATIENCE / 5)
            yield "{"
        self.result = Result("{" * 20, (), "stop", statistics(1, 20), 0)


class HoldingRenderer:
    """Renders a call when it is complete."""

    def idle(self) -> bytes:
        return b"idle"

    def reading(self, event: object) -> bytes:
        return b"reading"

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        return {}

    def opening(self) -> Iterable[bytes]:
        return [b"opening"]

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        return [b"call"] if isinstance(event, ChoiceEnd) else []

    def failed(self, error: object) -> Iterable[bytes]:
        return [b"failed"]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        return [b"ending"]


def test_a_stream_shows_life_while_a_call_is_generated():
    async def sent() -> list[bytes]:
        generation = ChoiceStream([SlowCall()], lambda: None)
        first = TextPiece(0, "{")
        return [frame async for frame in frames(generation, HoldingRenderer(), first, PATIENCE, lambda: None)]

    opening, *between, call, ending = asyncio.run(sent())

    assert (opening, call, ending) == (b"opening", b"call", b"ending")
    assert len(between) >= 2
    assert {*between} == {b"idle"}
