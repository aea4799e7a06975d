"""Who may connect over a network: pinned keys, and the one-time keys of invitations.

Answers libzmq's questions (ZAP, ZeroMQ RFC 27) in the caller's loop; libzmq holds a connection back until then.
Knows no messages and no clock.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.errors import InputError, PipelineError
from protocol.security.keys import guest_keys, new_secret
from protocol.security.pins import Pins

ZAP_DOMAIN = b"launch-pipeline"
INVITATION_SECONDS = 600.0
_MOST_INVITATIONS = 64
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Guard:
    """Admits the keys that are pinned in `folder` and those of invitations that were neither used nor expired.

    One a context. Poll `socket` and call `handle`; times are seconds on any one monotonic clock.
    """

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        if not zmq.has("curve"):
            raise PipelineError("This pyzmq was built without CURVE: install pyzmq's own wheel (`pip install pyzmq`).")
        self._pins = Pins(folder)
        self._invitations: dict[bytes, float] = {}
        """When each one-time public key expires."""
        self._admitted: frozenset[bytes] = frozenset()
        """All keys, pinned and one-time, whose messages count."""
        self.denied = 0
        """Handshakes that were refused."""
        self._take_stock()
        self.socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    @property
    def pinned(self) -> dict[str, bytes]:
        """Public keys by the names of their guests."""
        return self._pins.by_name

    def name_of(self, identity: bytes) -> str | None:
        """The guest who holds this key; None for a one-time key."""
        return self._pins.name_of(identity)

    def admits(self, identity: bytes) -> bool:
        """Whether a message of this key still counts; asked for each one."""
        return identity in self._admitted

    def invite(self, now: float) -> bytes:
        """The secret of a new join line, good for one guest and ten minutes."""
        self._expire(now)
        if len(self._invitations) >= _MOST_INVITATIONS:
            raise InputError(f"{_MOST_INVITATIONS} join lines are waiting to be used: use one, or try in ten minutes.")
        secret = new_secret()
        self._invitations[guest_keys(secret).public] = now + INVITATION_SECONDS
        self._take_stock()
        return secret

    def redeem(self, identity: bytes, name: str, public: bytes, now: float) -> str:
        """Use the invitation up that `identity` came with, and pin the guest's own key; the name it is pinned under.

        Raises InputError if there is no such invitation any more, or the key is none.
        """
        self._expire(now)
        if identity not in self._invitations:
            raise InputError("This join line was used or is older than ten minutes: ask for a new one.")
        if public in self._invitations:
            raise InputError("A guest must be pinned by a key of its own, not by a join line's.")
        pinned = self._pins.add(name, public)
        del self._invitations[identity]
        self._take_stock()
        return pinned

    def pin(self, name: str, public: bytes) -> str:
        """Let a key in for good; the name it is known by."""
        pinned = self._pins.add(name, public)
        self._take_stock()
        return pinned

    def revoke(self, name: str) -> bytes:
        """From now on nothing that this guest says counts, on open connections neither; its key.

        Raises InputError if there is no guest of that name.
        """
        public = self._pins.remove(name)
        self._take_stock()
        return public

    def handle(self, now: float) -> None:
        """Answer every handshake that waits."""
        if not self.socket.poll(0):
            return
        self._expire(now)
        with suppress(InputError):  # a file that is no longer fit to be read changes nothing
            self._pins.refresh()
        self._take_stock()
        while self.socket.poll(0):
            self.socket.send_multipart(self._answer(self.socket.recv_multipart()))

    def close(self) -> None:
        """Without a guard, the sockets that it guarded let nobody in."""
        # At once, where closing alone leaves handshakes to wait for an answer.
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
            self._take_stock()

    def _take_stock(self) -> None:
        self._admitted = frozenset(self._pins.by_name.values()) | frozenset(self._invitations)
