"""Decides which keys may connect over a network: pinned keys, and the one-time keys of invitations.

Answers libzmq's authentication requests (ZAP, ZeroMQ RFC 27) in the caller's loop; libzmq holds a connection back until
it has the answer. Knows no messages and no clock.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.errors import InputError, PipelineError
from protocol.security.keys import new_secret, one_time_keys
from protocol.security.pins import Pins

ZAP_DOMAIN = b"launch-pipeline"
INVITATION_SECONDS = 600.0
_MAX_INVITATIONS = 64
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Guard:
    """Admits the keys that are pinned in `folder`, and those of invitations that are neither used nor expired.

    At most one for each ZeroMQ context. Poll `socket` and call `handle`; times are seconds of one monotonic clock.
    """

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        if not zmq.has("curve"):
            raise PipelineError("This pyzmq was built without CURVE: install pyzmq's own wheel (`pip install pyzmq`).")
        self._pins = Pins(folder)
        self._invitations: dict[bytes, float] = {}
        """Expiry time of each one-time public key."""
        self._admitted: frozenset[bytes] = frozenset()
        """All keys, pinned and one-time, whose messages are accepted."""
        self.denied = 0
        """Number of refused handshakes."""
        self._update_admitted()
        self.socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    @property
    def pinned(self) -> dict[str, bytes]:
        """Public keys by name."""
        return self._pins.by_name

    def name_of(self, identity: bytes) -> str | None:
        """The name of a pinned key; None for a one-time key."""
        return self._pins.name_of(identity)

    def admits(self, identity: bytes) -> bool:
        """Whether messages of this key are accepted; to be called for each message."""
        return identity in self._admitted

    def invite(self, now: float) -> bytes:
        """The secret of a new join line, which admits one machine within ten minutes."""
        self._expire(now)
        if len(self._invitations) >= _MAX_INVITATIONS:
            raise InputError(f"{_MAX_INVITATIONS} join lines are unused: use one, or try again in ten minutes.")
        secret = new_secret()
        self._invitations[one_time_keys(secret).public] = now + INVITATION_SECONDS
        self._update_admitted()
        return secret

    def redeem(self, identity: bytes, name: str, public: bytes, now: float) -> str:
        """Exchange the invitation whose key is `identity` for a pinned key; returns the name that the key got.

        Raises InputError if the invitation was used or has expired, or if `public` is not a key.
        """
        self._expire(now)
        if identity not in self._invitations:
            raise InputError("This join line was used or is older than ten minutes: ask for a new one.")
        if public in self._invitations:
            raise InputError("A machine must join with its own key, not with the key of a join line.")
        pinned = self._pins.add(name, public)
        del self._invitations[identity]
        self._update_admitted()
        return pinned

    def pin(self, name: str, public: bytes) -> str:
        """Admit a key permanently; returns the name that it got."""
        pinned = self._pins.add(name, public)
        self._update_admitted()
        return pinned

    def revoke(self, name: str) -> bytes:
        """Remove a pinned key and return it; its messages on open connections are refused, too.

        Raises InputError for an unknown name.
        """
        public = self._pins.remove(name)
        self._update_admitted()
        return public

    def handle(self, now: float) -> None:
        """Answer all pending handshakes."""
        if not self.socket.poll(0):
            return
        self._expire(now)
        with suppress(InputError):  # a file that became unreadable changes no pins
            self._pins.refresh()
        self._update_admitted()
        while self.socket.poll(0):
            self.socket.send_multipart(self._answer(self.socket.recv_multipart()))

    def close(self) -> None:
        """Stop answering: from now on libzmq refuses all handshakes."""
        # Unbinding refuses pending handshakes at once; closing alone would leave them waiting.
        self.socket.unbind(_ENDPOINT)
        self.socket.close()

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        version, number, domain, _, _, mechanism, *credentials = request
        if (version, domain, mechanism) == (_VERSION, ZAP_DOMAIN, b"CURVE") and len(credentials) == 1:
            identity = z85.encode(credentials[0])
            if self.admits(identity):
                return [_VERSION, number, b"200", b"OK", identity, b""]
        self.denied += 1
        return [_VERSION, number, b"400", b"Unknown key", b"", b""]

    def _expire(self, now: float) -> None:
        expired = [public for public, end in self._invitations.items() if now >= end]
        for public in expired:
            del self._invitations[public]
        if expired:
            self._update_admitted()

    def _update_admitted(self) -> None:
        self._admitted = frozenset(self._pins.by_name.values()) | frozenset(self._invitations)
