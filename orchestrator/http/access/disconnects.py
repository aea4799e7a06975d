"""Waits for a client's body, and stops work whose client has disconnected."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request

from orchestrator.http.errors import ApiError

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
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `function` from a thread. A thread can't be stopped: when it is cancelled, this returns after the
    thread has ended, so that a lock of the caller is held as long."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
