"""Server-sent events: chunks as they come, comments while nothing does."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.http.answers import Answer, ended
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import Event, Generation, Text
from orchestrator.http.tools import Caller

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """Calls `close` at its end, however it ends, and even if it never began; more than once is to do no harm."""

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(frames, headers=_HEADERS, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def frames(
    generation: Generation,
    answer: Answer,
    choices: int,
    first: Event | None,
    patience: float,
    close: Callable[[], None],
) -> AsyncIterator[bytes]:
    """`first`: what came before the stream was opened, None if nothing did for `patience` seconds.

    `close` is called when nothing more is generated: whoever has read the end finds the place free.
    """
    for chunk in answer.opening(choices):
        yield _frame(chunk)
    event = first
    callers = [Caller(answer.most_calls) if answer.tools else None for _ in range(choices)]
    try:
        while True:
            if event is None:
                yield _KEEP_ALIVE
            else:
                for chunk in _chunks(answer, event, callers[event.index]):
                    yield _frame(chunk)
            if generation.results is not None:
                break
            event = await generation.next(patience)
    except ApiError as error:
        # The status has gone out already; clients look for this key.
        yield _frame(error.body())
        return
    close()
    if answer.with_usage:
        yield _frame(answer.last(generation.results))
    yield _DONE


def _chunks(answer: Answer, event: Event, caller: Caller | None) -> Iterator[dict[str, Any]]:
    """What an event is to the client; `caller` holds back what may be a call of a tool."""
    if isinstance(event, Text):
        text = event.text if caller is None else caller.push(event.text)
        if text:
            yield answer.piece(event.index, text)
        return
    rest, calls = ("", []) if caller is None else caller.finish()
    if rest:
        yield answer.piece(event.index, rest)
    if calls:
        yield answer.calls(event.index, calls)
    yield answer.end(event.index, ended(event.result, calls))


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
