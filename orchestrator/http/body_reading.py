"""Reads what the bodies of requests ask, beside the event loop if they are long. Knows no API's fields."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from starlette.requests import Request

from orchestrator.http.access.disconnects import body, in_thread, unless_gone

_SHORT_BYTES = 1 << 14
"""Such a body is read at once."""
_LONG_BYTES = 1 << 16
"""Longer ones take turns, because what they become takes up to 20 times their length in memory."""

T = TypeVar("T")


async def read_body(request: Request, read: Callable[[bytes], T], *, aside: bool = False) -> T:
    """What `read` makes of the request's body; raises what `read` raises. `aside`: in a thread, however short."""
    return await read_content(request, await body(request), read, aside=aside)


async def read_content(request: Request, content: bytes, read: Callable[[bytes], T], *, aside: bool = False) -> T:
    """As `read_body`, of a body that has arrived."""
    if len(content) <= _SHORT_BYTES and not aside:
        return read(content)
    turn: asyncio.Lock | None = request.app.state.long_bodies if len(content) > _LONG_BYTES else None

    async def reading() -> T:
        async with turn or nullcontext():
            return await in_thread(read, content)

    return await unless_gone(request, reading())
