"""Server-sent events: what is generated as it comes, signs of life while nothing does. Knows no API's shape."""

from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.http.errors import ApiError
from orchestrator.http.generation import ChoiceStream, OutputEvent
from orchestrator.http.renderer import Renderer

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
    generation: ChoiceStream, shape: Renderer, first: OutputEvent | None, patience: float, close: Callable[[], None]
) -> AsyncIterator[bytes]:
    """`first`: what came before the stream was opened, None if nothing did for `patience` seconds.

    `close` is called when nothing more is generated: whoever has read the end finds the place free.
    """
    for each in shape.opening():
        yield each
    event = first
    try:
        while True:
            if event is None:
                yield shape.idle
            else:
                for each in shape.told(event):
                    yield each
            if generation.results is not None:
                break
            event = await generation.next(patience)
    except ApiError as error:
        for each in shape.failed(error):
            yield each
        return
    close()
    for each in shape.ending(generation.results):
        yield each
