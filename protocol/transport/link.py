"""A worker's or client's end of a connection: one DEALER to one hub. Does not know what a message means."""

from typing import Any, Literal

import zmq

from protocol.errors import WireError
from protocol.messages.base import Message
from protocol.messages.features import FeatureBlock, FeatureShipment, ProjectionBlock, ProjectionShipment
from protocol.messages.remote import Shipment
from protocol.security.keys import KeyPair
from protocol.transport.codec import MAX_FRAME, Stamp, decode, encode
from protocol.transport.sockets import configured_dealer, connect

ConnectionState = Literal["connecting", "up", "down", "denied", "wrong server"]
"""connecting: no answer yet. up: connected. down: it was up, and libzmq retries. denied: the hub does not admit these
keys or has no CURVE, and libzmq has given up. wrong server: the peer has another public key than given, or no guard,
and libzmq retries."""

_SHIPPED: dict[type, Any] = {FeatureBlock: FeatureShipment, ProjectionBlock: ProjectionShipment}
"""Messages with a second frame, and what both are together."""
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
        limit: int = MAX_FRAME,
    ) -> None:
        """`server` (the hub's public key) and `keys` (our own) go together; on this machine both may be left out."""
        self.socket = configured_dealer(context, address, server, keys, limit)
        self._handshake = _Handshake(self.socket) if server else None
        connect(self.socket, address)
        self._limit = limit
        self._stamp = stamp
        self._expected = expected
        self.stale = 0
        self.rejected = 0

    def send(self, message: Message | Shipment | FeatureShipment | ProjectionShipment) -> None:
        if isinstance(message, tuple):
            self.socket.send_multipart([encode(message.block, self._stamp), message.payload])
        else:
            self.socket.send(encode(message, self._stamp))

    def receive(self, wait: float | None) -> list[Any]:
        """Messages that have arrived, in order; waits up to `wait` seconds (None: for ever) for the first.

        A block comes with its bytes, as a FeatureShipment or ProjectionShipment. A message with another stamp and a
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
                stamp, message = _parsed(frames, self._expected, self._limit)
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

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def close(self) -> None:
        """Close, after at most a second for sent messages to leave."""
        if self._handshake is not None:
            self._handshake.close()
        self.socket.close(linger=1000)


def _parsed(frames: list[bytes], expected: Any, limit: int) -> tuple[Stamp, Any]:
    """A message is one frame; only a block has a second one. Raises WireError."""
    stamp, message = decode(frames[0], expected, limit)
    shipped = next((pair for kind, pair in _SHIPPED.items() if isinstance(message, kind)), None)
    if len(frames) != (1 if shipped is None else 2):
        raise WireError("The orchestrator sent a message with a wrong number of frames.")
    return stamp, message if shipped is None else shipped(message, frames[1])


class _Handshake:
    """The CURVE handshakes of one connecting socket, from libzmq's monitor events. To be made before it connects."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.state: ConnectionState = "connecting"
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
                self.state = "down"

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        # An open monitor socket would block the context's end for ever.
        self._events.close(linger=0)
