"""Streams a generation as server-sent events, with keep-alives in between. Knows no API's format."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.http.errors import ApiError, internal_error
from orchestrator.http.generation import ChoiceStream, PromptProgress, Renderer, StreamEvent

log = logging.getLogger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """A stream of server-sent events. Calls `close` when it ends, for whatever reason; `close` may be called twice."""

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(frames, headers=_HEADERS, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


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
    if event is None:
        return [renderer.idle()]
    return [renderer.reading(event)] if isinstance(event, PromptProgress) else [*renderer.render(event)]
