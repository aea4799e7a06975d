"""Transport between processes: messages to bytes and back, ZeroMQ sockets with every limit set at addresses that their
keys allow, and a worker's or client's link to a hub. Does not know what a message means.

A frame of msgpack is decoded directly into the message types of its direction, so that no other object is ever built
from received bytes.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import zmq

from protocol.errors import InputError, WireError
from protocol.messages.base import VERSION, Message
from protocol.messages.features import FeatureBlock, FeatureShipment
from protocol.messages.remote import Shipment
from protocol.security.addresses import Endpoint, endpoint, require_local
from protocol.security.keys import KeyPair

_pack: Callable[[object], bytes] = import_module("msgpack").packb
MAX_FRAME = 16 << 20
"""Bytes. A Start with a million tokens is the largest message; control traffic stays under 64 KiB."""
MAX_WORKER_FRAME = 1 << 20
"""Bytes of the largest frame from a worker: a Verdict with the log-probabilities of 1,024 tokens has 0.33 MiB."""

M = TypeVar("M")


class Stamp(NamedTuple):
    """The life of the orchestrator (epoch) and of the worker (incarnation) that a message belongs to."""

    epoch: int
    incarnation: int


def encode(message: Message, stamp: Stamp) -> bytes:
    """One frame of msgpack: [version, epoch, incarnation, body]."""
    return _pack((VERSION, stamp.epoch, stamp.incarnation, msgspec.to_builtins(message)))


def decode(frame: bytes, expected: type[M] | Any, limit: int = MAX_FRAME) -> tuple[Stamp, M]:
    """The stamp and the message of a frame, validated against the union `expected`.

    Raises WireError for anything else: too large, not msgpack, another version, a wrong field.
    """
    if len(frame) > limit:
        raise WireError(f"A peer sent a frame of {len(frame):,} bytes; the limit is {limit:,}.")
    try:
        version, epoch, incarnation, body = _ENVELOPE.decode(frame)
        if version != VERSION:
            raise WireError(
                f"A peer speaks protocol version {version}, this side {VERSION}: install the same release on both."
            )
        return Stamp(epoch, incarnation), _decoder(expected).decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"A peer sent a frame that this protocol does not allow: {error}.") from error


_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, int, int, msgspec.Raw])
"""The body is decoded only if the version is ours."""


@cache
def _decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(expected)


AnySocket = TypeVar("AnySocket", bound=zmq.Socket[Any])

_HIGH_WATER = 10_000
"""Frames queued for a peer before libzmq blocks the sender."""


def configured_dealer(
    context: zmq.Context[AnySocket],
    address: str,
    server: bytes = b"",
    keys: KeyPair | None = None,
) -> AnySocket:
    """A DEALER with our limits, not yet connected. Raises InputError for an address that needs keys and has none."""
    keyed = bool(server) and keys is not None
    dealer = configured_socket(context.socket(zmq.DEALER), checked_endpoint(address, keyed), MAX_FRAME)
    if server and keys is not None:
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return dealer


def connected_dealer(context: zmq.Context[AnySocket], address: str) -> AnySocket:
    """A DEALER with our limits, connected to an address on this machine. Raises InputError for any other address."""
    return connect(configured_dealer(context, address), address)


def connect(dealer: AnySocket, address: str) -> AnySocket:
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close()
        raise InputError(f"Cannot connect to {address} ({error.strerror}): check the address.") from error
    return dealer


def checked_endpoint(address: str, keyed: bool, listening: bool = False) -> Endpoint | None:
    """The TCP endpoint, or None for ipc. Raises InputError for another machine's address without keys."""
    if not keyed:
        require_local(address, listening)
    return endpoint(address, listening)


def configured_socket(socket: AnySocket, where: Endpoint | None, limit: int) -> AnySocket:
    """Set the limits that libzmq leaves open. `where`: a TCP endpoint or None; `limit`: bytes of the largest frame."""
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    if where is not None:
        # On one machine the system closes the connection of a process that ended. One that was stopped goes on.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.setsockopt(zmq.IPV6, where is not None and ":" in where.host)
    return socket


ConnectionState = Literal["connecting", "up", "down", "denied", "wrong server"]
"""connecting: no answer yet. up: connected. down: it was up, and libzmq retries. denied: the hub does not admit these
keys or has no CURVE, and libzmq has given up. wrong server: the peer has another public key than given, or no guard,
and libzmq retries."""

_STATES: dict[int, ConnectionState] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "denied",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "denied",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "wrong server",
}


class Link:
    """Sends with the stamp of one life, and receives only messages that carry it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        stamp: Stamp,
        expected: Any,
        *,
        server: bytes = b"",
        keys: KeyPair | None = None,
    ) -> None:
        """`server` (the hub's public key) and `keys` (our own) go together; on this machine both may be left out."""
        self.socket = configured_dealer(context, address, server, keys)
        self._handshake = _Handshake(self.socket) if server else None
        connect(self.socket, address)
        self._stamp = stamp
        self._expected = expected
        self.stale = 0
        self.rejected = 0

    def send(self, message: Message | Shipment | FeatureShipment) -> None:
        if isinstance(message, tuple):
            self.socket.send_multipart([encode(message.block, self._stamp), message.payload])
        else:
            self.socket.send(encode(message, self._stamp))

    def receive(self, wait: float | None) -> list[Any]:
        """Messages that have arrived, in order; waits up to `wait` seconds (None: for ever) for the first.

        A block comes with its bytes, as a FeatureShipment. A message with another stamp and a
        frame that breaks the protocol are counted and dropped.
        """
        arrived = self.socket.poll(None if wait is None else int(wait * 1000))
        if self._handshake is not None:
            self._handshake.refresh()
        if not arrived:
            return []
        messages: list[Any] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                stamp, message = _parsed(frames, self._expected)
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
    def state(self) -> ConnectionState:
        """The state at the last `receive`; always "up" without keys."""
        return "up" if self._handshake is None else self._handshake.state

    def reconnected(self) -> bool:
        """Whether a connection was lost and is up again since the last call: what was sent, or was on its way here, may
        be lost. A `receive` may see both at once."""
        again = self._handshake is not None and self._handshake.lost and self.state == "up"
        if self._handshake is not None and again:
            self._handshake.lost = False
        return again

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def close(self) -> None:
        """Close, after at most a second for sent messages to leave."""
        if self._handshake is not None:
            self._handshake.close()
        self.socket.close(linger=1000)


def _parsed(frames: list[bytes], expected: Any) -> tuple[Stamp, Any]:
    """A message is one frame; only a block has a second one. Raises WireError."""
    stamp, message = decode(frames[0], expected)
    is_block = isinstance(message, FeatureBlock)
    if len(frames) != (2 if is_block else 1):
        raise WireError("The orchestrator sent a message with a wrong number of frames.")
    return stamp, FeatureShipment(message, frames[1]) if is_block else message


class _Handshake:
    """The CURVE handshakes of one connecting socket, from libzmq's monitor events. To be made before it connects."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.state: ConnectionState = "connecting"
        self.lost = False
        """A connection that was up."""
        self._socket = socket
        self._events: zmq.Socket[Any] = socket.get_monitor_socket(sum(_STATES) | zmq.EVENT_DISCONNECTED)

    def refresh(self) -> None:
        """Read pending events. To be called regularly: libzmq blocks when its events are not read."""
        while self._events.poll(0):
            # It brings asyncio, for which commands without encryption need not wait.
            from zmq.utils.monitor import recv_monitor_message

            event = recv_monitor_message(self._events)["event"]
            if event in _STATES:
                self.state = _STATES[event]
            elif self.state == "up":
                self.state, self.lost = "down", True

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        # An open monitor socket would block the context's end for ever.
        self._events.close(linger=0)
