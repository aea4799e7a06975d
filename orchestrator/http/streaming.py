"""Server-sent events: chunks as they come, comments while nothing does."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.http.answers import Answer
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import Event, Generation, Text

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
    try:
        while True:
            yield _KEEP_ALIVE if event is None else _frame(_chunk(answer, event))
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


def _chunk(answer: Answer, event: Event) -> dict[str, Any]:
    return answer.piece(event.index, event.text) if isinstance(event, Text) else answer.end(event.index, event.result)


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
