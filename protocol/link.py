"""ZeroMQ sockets with every limit set, and envelopes checked. Knows no message's meaning."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq

from protocol.codec import MAX_FRAME, Stamp, decode, encode
from protocol.errors import InputError, WireError
from protocol.messages import Message

S = TypeVar("S", bound=zmq.Socket[Any])

_HIGH_WATER = 10_000
"""Frames queued for a peer before the oldest sender notices."""
_MOST_AT_ONCE = 256
"""Frames handled before the caller has its turn again."""
_LOCAL_PREFIXES = ("ipc://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:")


class Arrival(NamedTuple):
    """A valid message, who sent it and for which life it was meant."""

    peer: bytes
    stamp: Stamp
    message: Any


class Hub:
    """The orchestrator's end: one ROUTER that many peers connect to."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        expected: Any,
        on_reject: Callable[[bytes, str], None] | None = None,
    ) -> None:
        """`on_reject` is told of a peer's frame that breaks the protocol, and why."""
        require_local(address)
        self._on_reject = on_reject
        self.socket = _configured(context.socket(zmq.ROUTER))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._expected = expected
        self.rejected = 0
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise InputError(
                f"Cannot listen on {address}: {error}. Is another pipeline using it? Choose another address."
            ) from error

    def send(self, peer: bytes, message: Message, stamp: Stamp) -> bool:
        """Queue a message; False if the peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([peer, encode(message, stamp)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> Iterator[Arrival]:
        """What has arrived, but never so much that a peer which floods us keeps the caller from other duties.

        A frame that breaks the protocol is counted and dropped.
        """
        for _ in range(_MOST_AT_ONCE):
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError("A peer sent a message of several frames.")
                stamp, message = decode(frames[0], self._expected)
            except WireError as error:
                self.rejected += 1
                if self._on_reject is not None:
                    self._on_reject(peer, str(error))
                continue
            yield Arrival(peer, stamp, message)

    def close(self) -> None:
        self.socket.close(linger=0)


class Link:
    """A worker's or client's end: one DEALER to one hub."""

    def __init__(self, context: zmq.Context[Any], address: str, stamp: Stamp, expected: Any) -> None:
        self.socket = configured_dealer(context, address)
        self._stamp = stamp
        self._expected = expected
        self.stale = 0
        self.rejected = 0

    def send(self, message: Message) -> None:
        self.socket.send(encode(message, self._stamp))

    def receive(self, wait: float | None) -> list[Any]:
        """Messages that have arrived, in order; waits up to `wait` seconds (None: for ever) for the first.

        A message for another life is counted and dropped, and so is one that breaks the protocol.
        """
        if not self.socket.poll(None if wait is None else int(wait * 1000)):
            return []
        messages = []
        while True:
            try:
                stamp, message = decode(self.socket.recv(zmq.NOBLOCK), self._expected)
            except zmq.Again:
                return messages
            except WireError:
                self.rejected += 1
                continue
            if stamp != self._stamp:
                self.stale += 1
                continue
            messages.append(message)

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def close(self) -> None:
        """Flush what was sent for at most a second, then go."""
        self.socket.close(linger=1000)


def configured_dealer(context: zmq.Context[S], address: str) -> S:
    """A DEALER with our limits, connected. Raises InputError for an address beyond this machine."""
    require_local(address)
    socket = _configured(context.socket(zmq.DEALER))
    socket.connect(address)
    return socket


def require_local(address: str) -> None:
    """Refuse addresses beyond this machine: they need keys. Refuse ipc paths that the OS would cut."""
    if not address.startswith(_LOCAL_PREFIXES):
        raise InputError(
            f"{address} is not on this machine. Use ipc:///path or tcp://127.0.0.1:PORT; "
            "listening on a network needs keys, which this release does not have."
        )
    if address.startswith("ipc://") and len(os.fsencode(Path(address.removeprefix("ipc://")))) > 100:
        raise InputError(f"The socket path of {address} is longer than 100 bytes: choose a shorter folder.")


def _configured(socket: S) -> S:
    """libzmq's defaults are unlimited; ours are not."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket
