"""Work for clients: how much is done at once, and what ends it: a client that disconnects, or the server's stop.

A request beyond the limit is refused at once. Each choice that is generated takes a place, and so does a request whose
tokens are counted or embedded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request

from orchestrator.http.errors import ApiError

_RETRY_SECONDS = 1


class AdmissionLimit:
    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, count: int) -> ExitStack:
        """Take `count` places, which the end of the context releases. Raises ApiError 429 if so many are not free, 400
        if there are not so many."""
        if count > self.most:
            raise ApiError(400, f"This server generates at most {self.most} texts at once: ask for fewer.", param="n")
        if self.taken + count > self.most:
            raise ApiError(
                429,
                f"All {self.most} places of this server are taken: try again in a moment.",
                code="queue_full",
                retry=_RETRY_SECONDS,
            )
        self.taken += count
        places = ExitStack()
        places.callback(self._release, count)
        return places

    def _release(self, count: int) -> None:
        self.taken -= count


T = TypeVar("T")
P = ParamSpec("P")


async def body(request: Request) -> bytes:
    """Raises ApiError 408 for a body that has not arrived within the application's `body_seconds`."""
    try:
        async with asyncio.timeout(request.app.state.body_seconds):
            return await request.body()
    except TimeoutError as error:
        raise ApiError(408, "The request's body did not come in time: send it again.", code="timeout") from error


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. Raises ClientDisconnect as soon as the client disconnects."""
    return await _unless(_disconnected(request), work)


class OpenWork:
    """Work for clients that a stop of the server ends."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._error = ApiError(503, "The server was stopped during this request: send it again later.")

    async def unless_ended(self, request: Request, work: Awaitable[T]) -> T:
        """As `unless_gone`. Raises the error of `stop` too, at once if that was called before."""
        return await unless_gone(request, _unless(self._stop(), work))

    def stop(self, error: ApiError | None = None) -> ApiError:
        """End all work, for good, with `error` or a sentence about the server's end. Returns the error."""
        self._error = error or self._error
        self._stopped.set()
        return self._error

    async def _stop(self) -> ApiError:
        await self._stopped.wait()
        return self._error


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `function` from a thread. A thread can't be stopped: when it is cancelled, this returns after the
    thread has ended, so that a lock of the caller is held as long."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise


async def _unless(ended: Coroutine[Any, Any, Exception], work: Awaitable[T]) -> T:
    """The result of `work`. Raises the error that `ended` returns first."""
    ending, working = asyncio.ensure_future(ended), asyncio.ensure_future(work)
    try:
        await asyncio.wait({ending, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ending.result()
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def _disconnected(request: Request) -> ClientDisconnect:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return ClientDisconnect()
