"""ZeroMQ sockets with every limit set, and envelopes checked. Knows no message's meaning."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq

from protocol.errors import InputError, WireError
from protocol.messages.base import Message
from protocol.messages.remote import KvBlock, Shipment
from protocol.security.addresses import Endpoint, endpoint, require_local
from protocol.security.guard import ZAP_DOMAIN, Guard
from protocol.security.keys import KeyPair
from protocol.transport.codec import MAX_FRAME, Stamp, decode, encode
from protocol.transport.handshake import ConnectionState, Handshake

S = TypeVar("S", bound=zmq.Socket[Any])

_HIGH_WATER = 10_000
"""Frames queued for a peer before the oldest sender notices."""
_MOST_AT_ONCE = 256
"""Frames handled before the caller has its turn again."""
_MOST_BYTES_AT_ONCE = 1 << 16
"""As many bytes: a large frame takes longer to handle than a small one."""
_MOST_SECONDS_AT_ONCE = 0.005
"""So long, the caller's own work on the messages included."""
_HIGH_WATER_ABROAD = 64
"""The same for whoever comes by TCP, so that one who floods us fills no more than this many frames."""


class Arrival(NamedTuple):
    """A valid message, who sent it and for which life it was meant."""

    peer: bytes
    stamp: Stamp
    message: Any
    identity: bytes = b""
    """The sender's public key, proved by CURVE; empty where there is no guard."""
    payload: bytes = b""
    """The raw frame of a KvBlock."""


class Hub:
    """The orchestrator's end: one ROUTER that many peers connect to."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        expected: Any,
        on_reject: Callable[[bytes, str], None] | None = None,
        *,
        guard: Guard | None = None,
        keys: KeyPair | None = None,
        limit: int = MAX_FRAME,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_reject` is told of a peer's frame that breaks the protocol, and why.

        `guard` and `keys`, which go together, let in over any transport only whom the guard admits. `limit`:
        bytes of the largest frame.
        """
        where = _checked(address, keyed=guard is not None and keys is not None, listening=True)
        self._file = _socket_file(address)
        if self._file is not None:
            _require_free(self._file)
        self._on_reject = on_reject
        self._guard = guard
        self._limit = limit
        self._clock = clock
        self._expected = expected
        self.rejected = 0
        self.crowded = 0
        """Messages that were dropped because their peer's queue was full; the peer may well be there."""
        self.strangers = 0
        """Messages of keys that are not, or no longer, admitted."""
        self.socket = _configured(context.socket(zmq.ROUTER), where, limit)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if where is not None:
            self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_ABROAD)
        if guard is not None and keys is not None:
            self._shut(keys)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise InputError(
                f"Cannot listen on {address} ({zmq.strerror(error.errno or 0)}): choose another address, "
                "or end what uses this one."
            ) from error

    def _shut(self, keys: KeyPair) -> None:
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Otherwise libzmq lets everybody in while there is no guard to ask.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_ABROAD)

    @property
    def address(self) -> str:
        """Where it listens; the port that was picked, where any would do."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, message: Message, stamp: Stamp) -> bool:
        """Queue a message; False if the peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([peer, encode(message, stamp)], zmq.NOBLOCK)
        except zmq.Again:
            self.crowded += 1
            return False
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> Iterator[Arrival]:
        """What has arrived, but never so much that a peer which floods us keeps the caller from other duties.

        A frame that breaks the protocol is counted and dropped.
        """
        handled = 0
        until = self._clock() + _MOST_SECONDS_AT_ONCE
        for _ in range(_MOST_AT_ONCE):
            if handled >= _MOST_BYTES_AT_ONCE or self._clock() >= until:
                return
            try:
                peer, frames, identity = self._next()
            except zmq.Again:
                return
            handled += sum(map(len, frames))
            if self._guard is not None and not self._guard.admits(identity):
                self.strangers += 1
                continue
            try:
                stamp, message = _parsed(frames, self._expected, self._limit)
            except WireError as error:
                self.rejected += 1
                if self._on_reject is not None:
                    self._on_reject(peer, str(error))
                continue
            yield Arrival(peer, stamp, message, identity, b"".join(frames[1:]))

    def _next(self) -> tuple[bytes, list[bytes], bytes]:
        """The next message: who sent it, its frames, and the sender's key where there is a guard."""
        if self._guard is None:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            return peer, frames, b""
        # Only frames that were not copied know their sender's key.
        received = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        peer, *frames = (frame.bytes for frame in received)
        with suppress(zmq.ZMQError):
            return peer, frames, str(received[-1].get("User-Id")).encode()
        return peer, frames, b""

    def close(self, linger: int = 0) -> None:
        """Let go of the address; what was sent may still leave for `linger` milliseconds."""
        self.socket.close(linger)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _parsed(frames: list[bytes], expected: Any, limit: int) -> tuple[Stamp, Any]:
    """One frame is a message; only blocks of KV have a second one. Raises WireError."""
    if not 1 <= len(frames) <= 2:
        raise WireError("A peer sent a message of several frames.")
    stamp, message = decode(frames[0], expected, limit)
    if len(frames) == 2 and not isinstance(message, KvBlock):
        raise WireError("A peer sent a message of several frames.")
    if len(frames) == 1 and isinstance(message, KvBlock):
        raise WireError("A peer sent a block of KV without its bytes.")
    return stamp, message


class Link:
    """A worker's or client's end: one DEALER to one hub."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        stamp: Stamp,
        expected: Any,
        *,
        server: bytes = b"",
        keys: KeyPair | None = None,
        limit: int = MAX_FRAME,
    ) -> None:
        """`server` (the hub's public key) and `keys` (our own) go together, and may be left out on this machine."""
        self.socket = _dealer(context, address, server, keys, limit)
        self._handshake = Handshake(self.socket) if server else None
        _connected(self.socket, address)
        self._limit = limit
        self._stamp = stamp
        self._expected = expected
        self.stale = 0
        self.rejected = 0

    def send(self, message: Message | Shipment) -> None:
        if isinstance(message, Shipment):
            self.socket.send_multipart([encode(message.block, self._stamp), message.payload])
        else:
            self.socket.send(encode(message, self._stamp))

    def receive(self, wait: float | None) -> list[Any]:
        """Messages that have arrived, in order; waits up to `wait` seconds (None: for ever) for the first.

        A message for another life is counted and dropped, and so is one that breaks the protocol.
        """
        arrived = self.socket.poll(None if wait is None else int(wait * 1000))
        if self._handshake is not None:
            self._handshake.refresh()
        if not arrived:
            return []
        messages = []
        while True:
            try:
                stamp, message = decode(self.socket.recv(zmq.NOBLOCK), self._expected, self._limit)
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
    def standing(self) -> ConnectionState:
        """How connecting went, as of the last `receive`; on this machine nobody is asked for keys."""
        return "up" if self._handshake is None else self._handshake.standing

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def close(self) -> None:
        """Flush what was sent for at most a second, then go."""
        if self._handshake is not None:
            self._handshake.close()
        self.socket.close(linger=1000)


def configured_dealer(context: zmq.Context[S], address: str) -> S:
    """A DEALER with our limits, connected. Raises InputError for what is no address on this machine."""
    return _connected(_dealer(context, address), address)


def _dealer(
    context: zmq.Context[S], address: str, server: bytes = b"", keys: KeyPair | None = None, limit: int = MAX_FRAME
) -> S:
    keyed = bool(server) and keys is not None
    dealer = _configured(context.socket(zmq.DEALER), _checked(address, keyed), limit)
    if server and keys is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return dealer


def _connected(dealer: S, address: str) -> S:
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close()
        raise InputError(f"Cannot connect to {address} ({error.strerror}): check the address.") from error
    return dealer


def _checked(address: str, keyed: bool, listening: bool = False) -> Endpoint | None:
    """Without keys only this machine may be spoken to."""
    if not keyed:
        require_local(address, listening)
    return endpoint(address, listening)


def _socket_file(address: str) -> Path | None:
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _require_free(file: Path) -> None:
    """libzmq removes whatever is at the path that it binds to: make sure that nobody misses it."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        if file.exists() and not file.is_socket():
            raise InputError(f"{file} is there already and is no socket: choose another address.")
        probe.connect(os.fspath(file))
        raise InputError(f"Another pipeline listens on ipc://{file}: choose another address, or end that one.")


def _configured(socket: S, where: Endpoint | None, limit: int) -> S:
    """libzmq's defaults are unlimited; ours are not. `where`: a TCP address, or None."""
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.setsockopt(zmq.IPV6, where is not None and ":" in where.host)
    return socket
