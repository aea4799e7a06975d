"""The orchestrator's end of connections: one ROUTER for many peers, with every frame checked. Does not know what a
message means."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from orchestrator.machine.network import require_unused
from orchestrator.runtime.guard import ZAP_DOMAIN, Guard
from protocol.errors import InputError, WireError
from protocol.messages.base import Message
from protocol.messages.features import FeatureBlock
from protocol.messages.remote import KvBlock
from protocol.security.keys import KeyPair
from protocol.security.private_files import is_private
from protocol.transport import MAX_FRAME, Stamp, checked_endpoint, configured_socket, decode, encode

_MAX_FRAMES = 256
"""Frames that one `receive` handles at most."""
_MAX_BYTES = 1 << 16
"""Bytes that one `receive` handles at most: a large frame takes longer than a small one."""
_MAX_SECONDS = 0.005
"""Seconds that one `receive` takes at most, the caller's work on the messages included."""
_LOOK_SECONDS = 2.0
"""How often a hub sees whether its socket's file is there."""
_TCP_HIGH_WATER = 64
"""Frames queued for a TCP peer: a peer that floods us fills no more."""


class Arrival(NamedTuple):
    """A valid message, its sender, and the life that it was meant for."""

    peer: bytes
    stamp: Stamp
    message: Any
    identity: bytes = b""
    """The sender's public key, proved by CURVE; empty without a guard."""
    payload: bytes = b""
    """The raw frame of a block."""


class Hub:
    """A ROUTER socket and its counters of dropped messages."""

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
        """`on_reject(peer, reason)` is called for every frame that breaks the protocol.

        `guard` and `keys` go together: with them only admitted keys connect, over any transport. `limit`: bytes of
        the largest frame.
        """
        self._on_reject = on_reject
        self._guard = guard
        self._limit = limit
        self._clock = clock
        self._expected = expected
        self.rejected = 0
        """Frames that broke the protocol."""
        self.queue_full = 0
        """Messages that were dropped because their peer's queue was full; the peer may well be there."""
        self.not_admitted = 0
        """Messages of keys that are not, or no longer, admitted."""
        self._address = address
        self._file = _socket_file(address)
        self._next_look = clock() + _LOOK_SECONDS
        self.socket = _listening(context, address, keys if guard is not None else None, limit)

    @property
    def address(self) -> str:
        """Where the hub listens; with the chosen port if the given one was 0."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, message: Message, stamp: Stamp, *payload: bytes) -> bool:
        """Queue a message, and the bytes of a block; False if the peer is gone or its queue is full."""
        try:
            self.socket.send_multipart([peer, encode(message, stamp), *payload], zmq.NOBLOCK)
        except zmq.Again:
            self.queue_full += 1
            return False
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> Iterator[Arrival]:
        """What has arrived, within the limits above: a peer that floods us must not keep the caller from other work.

        A frame that breaks the protocol is counted and dropped.
        """
        handled, now = 0, self._clock()
        until = now + _MAX_SECONDS
        if self._file is not None and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._listen_again(self._file)
        for _ in range(_MAX_FRAMES):
            if handled >= _MAX_BYTES or self._clock() >= until:
                return
            try:
                peer, frames, identity = self._next()
            except zmq.Again:
                return
            handled += sum(map(len, frames))
            if self._guard is not None and not self._guard.admits(identity):
                self.not_admitted += 1
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
        """The next message's peer and frames, and the sender's key if there is a guard."""
        if self._guard is None:
            peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            return peer, frames, b""
        # Only frames that are not copied carry their sender's key.
        received = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        peer, *frames = (frame.bytes for frame in received)
        with suppress(zmq.ZMQError):
            return peer, frames, str(received[-1].get("User-Id")).encode()
        return peer, frames, b""

    def _listen_again(self, file: Path) -> None:
        """After a cleaner of temporary files took the socket's file: new connections need it, others go on."""
        with suppress(OSError, zmq.ZMQError):
            if not file.exists() and is_private(file.parent.stat()):
                self.socket.bind(self._address)

    def close(self, linger: int = 0) -> None:
        """Release the address; sent messages have `linger` milliseconds to leave."""
        self.socket.close(linger)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _listening(context: zmq.Context[Any], address: str, keys: KeyPair | None, limit: int) -> zmq.Socket[Any]:
    """A bound ROUTER; with `keys` it asks the context's guard. Raises InputError if it can't listen there."""
    where = checked_endpoint(address, keyed=keys is not None, listening=True)
    file = _socket_file(address)
    if file is not None:
        _require_free(file)
    if where is not None:
        require_unused(where.host, where.port)
    router = configured_socket(context.socket(zmq.ROUTER), where, limit)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if where is not None:
        router.setsockopt(zmq.RCVHWM, _TCP_HIGH_WATER)
    if keys is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Otherwise libzmq admits every key while no guard answers.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.setsockopt(zmq.SNDHWM, _TCP_HIGH_WATER)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close()
        raise InputError(
            f"Cannot listen on {address} ({zmq.strerror(error.errno or 0)}): choose another address, "
            "or end the program that uses this one."
        ) from error
    return router


def _parsed(frames: list[bytes], expected: Any, limit: int) -> tuple[Stamp, Any]:
    """A message is one frame; only a block has a second one. Raises WireError."""
    if not 1 <= len(frames) <= 2:
        raise WireError("A peer sent a message of several frames.")
    stamp, message = decode(frames[0], expected, limit)
    if len(frames) == 2 and not isinstance(message, KvBlock | FeatureBlock):
        raise WireError("A peer sent a message of several frames.")
    if len(frames) == 1 and isinstance(message, KvBlock | FeatureBlock):
        raise WireError("A peer sent a block without its bytes.")
    return stamp, message


def _socket_file(address: str) -> Path | None:
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def _require_free(file: Path) -> None:
    """Raise InputError for another file or a socket in use: libzmq removes any file at the path that it binds to."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        if file.exists() and not file.is_socket():
            raise InputError(f"{file} exists and is not a socket: choose another address.")
        probe.connect(os.fspath(file))
        raise InputError(f"Another pipeline listens on ipc://{file}: choose another address, or end that pipeline.")
