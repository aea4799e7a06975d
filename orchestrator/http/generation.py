"""The choices of one HTTP request as they come, merged. What a slow reader has not read is kept."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import structlog

from orchestrator.api.result import Chosen, Result
from orchestrator.http.errors import ApiError, of_pipeline
from protocol.errors import PipelineError

log = structlog.get_logger()


class OutputSource(Protocol):
    """One choice: what `AsyncClient.stream` gives."""

    @property
    def result(self) -> Result | None: ...
    @property
    def chosen(self) -> Sequence[Chosen]:
        """Tokens so far with their likelihoods, if those were asked for."""
        ...

    def __aiter__(self) -> AsyncIterator[str]: ...


@dataclass(frozen=True)
class Text:
    index: int
    text: str
    chosen: Sequence[Chosen] = ()
    """Tokens that came with it, if their likelihoods were asked for."""


@dataclass(frozen=True)
class End:
    index: int
    result: Result


OutputEvent: TypeAlias = Text | End


class ChoiceStream:
    """Reads every choice to its end in tasks of its own; `close` cancels what is unfinished."""

    def __init__(self, choices: Sequence[OutputSource]) -> None:
        self._events: asyncio.Queue[OutputEvent | ApiError] = asyncio.Queue()
        self._results: list[Result | None] = [None] * len(choices)
        self._tasks = [asyncio.create_task(self._read(index, pieces)) for index, pieces in enumerate(choices)]

    @property
    def results(self) -> list[Result] | None:
        """Of all choices, once the last has ended and was handed out by `next`."""
        found = [result for result in self._results if result is not None]
        return found if len(found) == len(self._results) else None

    async def next(self, patience: float | None = None) -> OutputEvent | None:
        """What comes next; None if nothing does for `patience` seconds. Raises ApiError."""
        try:
            async with asyncio.timeout(patience):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, End):
            self._results[event.index] = event.result
        return event

    async def collect(self) -> list[Result]:
        """All of it."""
        while self.results is None:
            await self.next()
        return self.results

    def abort(self, error: ApiError) -> None:
        """End it; whoever waits for it is told why."""
        self._events.put_nowait(error)
        self.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read(self, index: int, pieces: OutputSource) -> None:
        try:
            told = 0
            async for piece in pieces:
                chosen = pieces.chosen[told:]
                told += len(chosen)
                self._events.put_nowait(Text(index, piece, chosen))
            result = pieces.result
            assert result is not None
            if result.finish_reason == "cancelled":
                raise PipelineError("The pipeline ended this request before its time: ask again.")
            self._events.put_nowait(End(index, result))
        except PipelineError as error:
            self._events.put_nowait(of_pipeline(error))
        except Exception:
            log.exception("a generation failed")
            self._events.put_nowait(ApiError(500, "The server failed at this request: its log says why."))
            raise
