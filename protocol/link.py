"""ZeroMQ sockets with every limit set, and envelopes checked. Knows no message's meaning."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
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
_ADDRESS = re.compile(r"ipc:///(?P<path>.*)|tcp://(?:127\.0\.0\.1|localhost|\[::1\]):(?P<port>[0-9]{1,5})", re.DOTALL)
_LONGEST_PATH = 100
"""Bytes; macOS cuts socket paths at 104."""
_LAST_PORT = 65535


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
        self._file = _socket_file(address)
        if self._file is not None:
            _require_free(self._file)
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
                f"Cannot listen on {address} ({zmq.strerror(error.errno or 0)}): choose another address, "
                "or end what uses this one."
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

    def close(self, linger: int = 0) -> None:
        """Let go of the address; what was sent may still leave for `linger` milliseconds."""
        self.socket.close(linger)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


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
    """A DEALER with our limits, connected. Raises InputError for what is no address on this machine."""
    require_local(address)
    dealer = _configured(context.socket(zmq.DEALER))
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close()
        raise InputError(f"Cannot connect to {address} ({error.strerror}): check the address.") from error
    return dealer


def require_local(address: str) -> None:
    """Refuse what is no address, or one beyond this machine: those need keys."""
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise InputError(
            f"{address} is not an address on this machine: use ipc:///path or tcp://127.0.0.1:PORT "
            "(listening on a network needs keys, which this release does not have)."
        )
    path, port = parts["path"], parts["port"]
    if port is not None and not 1 <= int(port) <= _LAST_PORT:
        raise InputError(f"{address} has no possible port: choose one from 1024 to {_LAST_PORT}.")
    if path is not None and not 1 <= len(os.fsencode(path)) < _LONGEST_PATH:
        raise InputError(
            f"The socket path of {address} must have 1 to {_LONGEST_PATH} bytes: "
            "choose another file, in a folder with a shorter name."
        )


def _socket_file(address: str) -> Path | None:
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _require_free(file: Path) -> None:
    """libzmq removes whatever is at the path that it binds to: make sure that nobody misses it."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        if file.exists() and not file.is_socket():
            raise InputError(f"{file} is there already and is no socket: choose another address.")
        probe.connect(os.fspath(file))
        raise InputError(f"Another pipeline listens on ipc://{file}: choose another address, or end that one.")


def _configured(socket: S) -> S:
    """libzmq's defaults are unlimited; ours are not."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket
