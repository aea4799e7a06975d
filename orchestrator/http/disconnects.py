"""Waiting for a client to say what it wants, and with a client for what comes of it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from orchestrator.http.errors import ApiError

_BODY_SECONDS = 30.0
"""Time that a client has for sending its question."""

T = TypeVar("T")


async def body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.body()
    except TimeoutError as error:
        raise ApiError(408, "The request's body did not come in time: send it again.", code="timeout") from error


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result. Raises ClientDisconnect as soon as nobody waits for it any more."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
