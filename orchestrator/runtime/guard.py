"""Decides which keys may connect over a network: pinned keys, and the one-time keys of invitations.

Pinned are public keys of other machines, by name, in a file of mode 0600 that several pipelines may share.
Answers libzmq's authentication requests (ZAP, ZeroMQ RFC 27) in the caller's loop; libzmq holds a connection back until
it has the answer. Knows no messages and no clock.
"""

import fcntl
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from protocol.errors import InputError, PipelineError
from protocol.security.keys import is_key, new_secret, one_time_keys
from protocol.security.private_files import lock_file, private_folder, read_private, write_private

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
        self.pins = Pins(folder)
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
        pinned = self.pins.add(name, public)
        del self._invitations[identity]
        self._update_admitted()
        return pinned

    def revoke(self, name: str) -> bytes:
        """Remove a pinned key and return it; its messages on open connections are refused, too.

        Raises InputError for an unknown name.
        """
        public = self.pins.remove(name)
        self._update_admitted()
        return public

    def handle(self, now: float) -> None:
        """Answer all pending handshakes."""
        if not self.socket.poll(0):
            return
        self._expire(now)
        with suppress(InputError):  # a file that became unreadable changes no pins
            self.pins.refresh()
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
        self._admitted = frozenset(self.pins.by_name.values()) | frozenset(self._invitations)


_FILE = "pins.json"
_MAX_PINS = 256
_MAX_NAME = 48
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9._-]+")


class Pins:
    """The pins in the file. Another pipeline of this user may change the file."""

    def __init__(self, folder: Path) -> None:
        self._file = private_folder(folder) / _FILE
        self._version: tuple[int, int, int] | None = None
        """Inode, modification time and size of the file that was read."""
        self._by_name: dict[str, bytes] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed. Raises InputError if other users could have written it."""
        try:
            status = self._file.lstat()
        except FileNotFoundError:
            self._version, self._by_name = None, {}
            return
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version != self._version:
            self._by_name = _parsed(self._file, read_private(self._file) or b"{}")
            self._version = version

    @property
    def by_name(self) -> dict[str, bytes]:
        """Public keys, as of the last refresh."""
        return dict(self._by_name)

    def name_of(self, public: bytes) -> str | None:
        return next((name for name, key in self._by_name.items() if key == public), None)

    def add(self, name: str, public: bytes) -> str:
        """Pin a key; returns its name, which is printable and unique. A key that is pinned already keeps its name."""
        if not is_key(public):
            raise InputError("A public key must be 32 bytes in Z85: run the same release on both machines.")
        with self._changing() as pins:
            known = self.name_of(public)
            if known is not None:
                return known
            if len(pins) >= _MAX_PINS:
                raise InputError(
                    f"{_MAX_PINS} machines are known already: revoke some (`launch-pipeline workers revoke NAME`)."
                )
            unique = _unique(name, pins.__contains__)
            pins[unique] = public
            return unique

    def remove(self, name: str) -> bytes:
        """Remove a pin; returns its key. Raises InputError for an unknown name."""
        with self._changing() as pins:
            if name not in pins:
                known = ", ".join(sorted(pins)) or "none"
                raise InputError(f"No machine is called {name[:100]!r} (known: {known}).")
            return pins.pop(name)

    @contextmanager
    def _changing(self) -> Generator[dict[str, bytes]]:
        """The pins under a file lock; changes to them are written at the end."""
        with lock_file(self._file.with_name(f".{_FILE}.lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refresh()
            pins = dict(self._by_name)
            yield pins
            if pins != self._by_name:
                text = {name: public.decode() for name, public in pins.items()}
                write_private(self._file, msgspec.json.format(msgspec.json.encode(text)))
                self.refresh()


def _parsed(file: Path, content: bytes) -> dict[str, bytes]:
    try:
        pins = {name: key.encode() for name, key in msgspec.json.decode(content, type=dict[str, str]).items()}
    except msgspec.DecodeError as error:
        raise InputError(
            f"{file} is damaged ({error}): remove it; other machines then need a new join line."
        ) from error
    wrong = next((name for name, public in pins.items() if not is_key(public)), None)
    if wrong is not None:
        raise InputError(
            f"{file} holds no valid key for {wrong!r}: remove that line; that machine then needs a new join line."
        )
    return pins


def _unique(name: str, taken: Callable[[str], bool]) -> str:
    """A unique name of characters that every terminal prints unchanged: `name` comes from another machine."""
    plain = _UNPRINTABLE.sub("-", name).strip("-.")[:_MAX_NAME] or "guest"
    unique, number = plain, 1
    while taken(unique):
        number += 1
        unique = f"{plain}-{number}"
    return unique
