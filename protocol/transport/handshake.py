"""How a connecting socket's attempts went, as libzmq tells them. Needs no thread."""

from typing import Any, Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

ConnectionState = Literal["connecting", "up", "down", "denied", "mistaken"]
"""connecting: no answer yet; up: connected; down: it was up, and libzmq tries again; denied: the hub does not admit
these keys or speaks no CURVE, libzmq has given up; mistaken: what answers has another key than was given, or no
guard, libzmq tries again."""

_MEANING: dict[int, ConnectionState] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "denied",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "denied",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "mistaken",
}


class Handshake:
    """Of one socket with one connection, watched from before it connects."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.standing: ConnectionState = "connecting"
        self._socket = socket
        self._events: zmq.Socket[Any] = socket.get_monitor_socket(sum(_MEANING) | zmq.EVENT_DISCONNECTED)

    def refresh(self) -> None:
        """To be called now and then, also by who does not care: libzmq waits for events to be taken."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event in _MEANING:
                self.standing = _MEANING[event]
            elif self.standing == "up":
                self.standing = "down"

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        # Otherwise the context would wait for it for ever.
        self._events.close(linger=0)
