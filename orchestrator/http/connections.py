"""Connections that no client can hold by sending or reading slowly.

Knows no route. uvicorn's own connections have a deadline only for the first byte of a further request.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.http.settings import ConnectionLimits, ServerSettings


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """What uvicorn makes connections with."""
    return cast(type[asyncio.Protocol], partial(Connection, settings.connections))


_WRITE_BUFFER = 1 << 14
"""Bytes that wait beyond the system's buffer; then nothing more is rendered for the client, and it has to read."""


class Connection(H11Protocol):
    """Closes when a request's head, the rest of a body that was already answered, or the client's reading is late.

    The deadlines of head and body are for the whole, not for the next byte.
    """

    def __init__(self, limits: ConnectionLimits, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._application = cast(ASGIApp, self.app)
        self.app = cast(Any, self._answer)
        self._reading = _Deadline(self.loop)
        self._writing = _Deadline(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(_WRITE_BUFFER)
        self._expect_input()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.clear()
        self._writing.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_input()
        self._expect_end()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP. An answer that has begun, or is complete, can't be followed by a refusal."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        super().send_400_response(msg)
        # The request whose body is no HTTP has its answer.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # For the head of a further request uvicorn's deadline holds until its first byte.
        if self.conn.their_state is h11.SEND_BODY:
            self._expect_input()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.clear()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._application(scope, receive, send)
        finally:
            # uvicorn may close the connection afterwards.
            self.loop.call_soon(self._expect_end)

    def _expect_input(self) -> None:
        """Set the deadline of what the client has to send now; it stays while the client is at the same thing."""
        answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        if self.conn.their_state is h11.IDLE:
            self._reading.set("head", self._limits.head_seconds, self.transport.abort)
        elif self.conn.their_state is h11.SEND_BODY and answered:
            self._reading.set("rest", self._limits.rest_seconds, self.transport.abort)
        else:
            self._reading.clear()

    def _expect_end(self) -> None:
        """A closed connection ends when the client has read the last bytes."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._expect_reading()

    def _expect_reading(self) -> None:
        """Nothing is written from now on, so that the buffer shrinks if the client reads."""
        left = self.transport.get_write_buffer_size()
        self._writing.set(left, self._limits.write_seconds, partial(self._require_reading, left))

    def _require_reading(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._expect_reading()
        else:
            self.transport.abort()


class _Deadline:
    """A call after some seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._cause: object = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, cause: object, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` after `seconds`; a deadline with the same `cause` stays as it is."""
        if cause != self._cause:
            self.clear()
            self._cause = cause
            self._timer = self._loop.call_later(seconds, then)

    def clear(self) -> None:
        self._cause = None
        if self._timer is not None:
            self._timer.cancel()
