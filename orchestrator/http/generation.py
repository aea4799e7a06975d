"""The events of all choices of one HTTP request, merged into one queue that holds what a slow client has not read.

Also the interface by which each API renders them, and the stream of server-sent events that they become.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.api.result import Chosen, OnReading, Result
from orchestrator.http.errors import ApiError, internal_error, of_pipeline
from protocol.errors import PipelineError

log = logging.getLogger(__name__)


class OutputSource(Protocol):
    """One choice: what `AsyncClient.stream` gives."""

    @property
    def request(self) -> str:
        """Its name in telemetry."""
        ...

    @property
    def result(self) -> Result | None: ...
    @property
    def chosen(self) -> Sequence[Chosen]:
        """Tokens so far with their log-probabilities, if the request asks for them."""
        ...

    def watch_reading(self, on_reading: OnReading) -> None:
        """As of `AsyncStream`."""
        ...

    def __aiter__(self) -> AsyncIterator[str]: ...


@dataclass(frozen=True)
class PromptProgress:
    """The target reads the prompt of a choice, or the choice waits for a place."""

    index: int
    tokens: int
    """That were read."""
    total: int
    queued: int = 0
    """As of `OnReading`."""

    @property
    def field(self) -> dict[str, Any]:
        """Of an event without text. `processed` and `total` are the names that llama.cpp's server gives them."""
        queued = {"queued": self.queued} if self.queued else {}
        return {"prompt_progress": {"processed": self.tokens, "total": self.total, **queued}}


@dataclass(frozen=True)
class TextPiece:
    index: int
    text: str
    chosen: Sequence[Chosen] = ()
    """The tokens of this text, if the request asks for log-probabilities."""


@dataclass(frozen=True)
class ChoiceEnd:
    index: int
    result: Result


OutputEvent: TypeAlias = TextPiece | ChoiceEnd
StreamEvent: TypeAlias = PromptProgress | OutputEvent


class ChoiceStream:
    """Reads each choice in its own task; `close` cancels those that are unfinished."""

    def __init__(
        self,
        choices: Sequence[OutputSource],
        measured: Callable[[OutputSource], AsyncIterator[str]],
        on_end: Callable[[], None],
    ) -> None:
        """`measured` gives the pieces of a choice. `on_end` is called when all choices have ended, whether their events
        were read or not."""
        self._events: asyncio.Queue[StreamEvent | ApiError] = asyncio.Queue()
        self._measured = measured
        self._on_end = on_end
        self._results: list[Result | None] = [None] * len(choices)
        self._tasks = [asyncio.create_task(self._read(index, pieces)) for index, pieces in enumerate(choices)]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    @property
    def results(self) -> list[Result] | None:
        """The results of all choices, in order, after `next` has returned the last ChoiceEnd; None before."""
        found = [result for result in self._results if result is not None]
        return found if len(found) == len(self._results) else None

    async def next(self, patience: float | None = None) -> StreamEvent | None:
        """The next event; None if there is none within `patience` seconds. Raises ApiError if a choice failed."""
        try:
            async with asyncio.timeout(patience):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, ChoiceEnd):
            self._results[event.index] = event.result
        return event

    async def collect(self) -> list[Result]:
        """Wait for the results of all choices. Raises ApiError if one failed."""
        while self.results is None:
            await self.next()
        return self.results

    def abort(self, error: ApiError) -> None:
        """Cancel all choices; the reader gets `error`."""
        self._events.put_nowait(error)
        self.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _on_task_end(self, _: asyncio.Task[None]) -> None:
        if all(task.done() for task in self._tasks):
            self._on_end()

    async def _read(self, index: int, pieces: OutputSource) -> None:
        pieces.watch_reading(lambda *told: self._events.put_nowait(PromptProgress(index, *told)))
        try:
            sent = 0
            async for piece in self._measured(pieces):
                chosen = pieces.chosen[sent:]
                sent += len(chosen)
                self._events.put_nowait(TextPiece(index, piece, chosen))
            result = pieces.result
            assert result is not None
            if result.finish_reason == "cancelled":
                raise PipelineError("The pipeline cancelled this request: send it again.")
            self._events.put_nowait(ChoiceEnd(index, result))
        except PipelineError as error:
            self._events.put_nowait(of_pipeline(error))
        except Exception:  # the border of a task: whoever waits for its events must hear of the end
            log.exception("a generation failed")
            self._events.put_nowait(internal_error())
            raise


EVENTS = "text/event-stream"
COMMENT = b": keep-alive\n\n"
"""A server-sent event that clients skip."""


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """The field of a response that says what of the request was changed."""
    return {"warnings": warnings} if warnings else {}


def sources(results: Sequence[Result]) -> dict[str, Any]:
    """The field of a response that says where its tokens come from, beside the usage."""
    figures = [result.statistics for result in results]
    rounds, tokens = sum(each.rounds for each in figures), sum(each.generated_tokens for each in figures)
    # A stop string may have cut off the last ones.
    draft = min(sum(each.draft_tokens for each in figures), tokens)
    lookup = min(sum(each.lookup_tokens for each in figures), tokens - draft)
    found = {"draft_tokens": draft, "lookup_tokens": lookup, "plain_tokens": tokens - draft - lookup}
    return {"speculation": {"rounds": rounds, "tokens_per_round": round(tokens / max(1, rounds), 2), **found}}


class Renderer(Protocol):
    """Renders one response of one API: as one object, or as server-sent events."""

    def idle(self, event: PromptProgress | None = None) -> bytes:
        """The event that keeps a stream alive while nothing is generated. `event`: what it says of the prompt."""
        ...

    def whole(self, results: Sequence[Result]) -> dict[str, Any]: ...

    def opening(self) -> Iterable[bytes]:
        """Events before the first text."""
        ...

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        """Events for a piece of text or for the end of a choice."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Events for an error after the HTTP status was sent."""
        ...

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        """Events after the end of all choices."""
        ...


@dataclass
class WaitingStream:
    """A stream whose model is not in memory yet: its events before the answer's, of which each is `event` with the
    reason."""

    encode: Callable[[dict[str, Any]], bytes]
    event: dict[str, Any]
    error: Callable[[ApiError], dict[str, Any]]
    media_type: str = EVENTS

    def waiting(self, loading: dict[str, Any]) -> Iterable[bytes]:
        return [self.encode({**self.event, "loading": loading})]

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [self.encode(self.error(error))]

    @property
    def state(self) -> dict[str, Any]:
        """What the answer must know of these events."""
        return {}


def frame(content: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"


_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """A stream of server-sent events. Calls `close` when it ends, for whatever reason; `close` may be called twice."""

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None], media_type: str = EVENTS) -> None:
        super().__init__(frames, headers=_HEADERS, media_type=media_type)
        self.frames = frames
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


async def frames(
    generation: ChoiceStream, renderer: Renderer, first: StreamEvent | None, patience: float, close: Callable[[], None]
) -> AsyncIterator[bytes]:
    """`first`: the event before the stream was opened; None if there was none within `patience` seconds.

    After `patience` seconds without a frame comes one of `idle`, also while events arrive that make no frame, as the
    text of a call does before that is complete. `close` is called before the last frames: a client that has read the
    end finds its place free.
    """
    clock = asyncio.get_running_loop().time
    event, sent = first, clock()
    try:
        for each in renderer.opening():
            yield each
        while True:
            made = _rendered(event, renderer)
            if not made and clock() - sent >= patience:
                made = [renderer.idle()]
            for each in made:
                yield each
                sent = clock()
            if generation.results is not None:
                break
            event = await generation.next(max(0, sent + patience - clock()))
        close()
        for each in renderer.ending(generation.results):
            yield each
    except ApiError as error:
        for each in renderer.failed(error):
            yield each
    except Exception:  # the border of a request: its status has been sent, so only an event can tell
        log.exception("a stream failed")
        for each in renderer.failed(internal_error()):
            yield each


def _rendered(event: StreamEvent | None, renderer: Renderer) -> Sequence[bytes]:
    return [*renderer.render(event)] if isinstance(event, TextPiece | ChoiceEnd) else [renderer.idle(event)]
