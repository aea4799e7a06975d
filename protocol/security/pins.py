"""Pinned public keys of other machines, by name, in a file of mode 0600 that several pipelines may share."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from protocol.errors import InputError
from protocol.security.keys import is_key
from protocol.security.private_files import private_folder, read_private, write_private

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
    def _changing(self) -> Iterator[dict[str, bytes]]:
        """The pins under a file lock; changes to them are written at the end."""
        lock = os.open(self._file.with_name(f".{_FILE}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refresh()
            pins = dict(self._by_name)
            yield pins
            if pins != self._by_name:
                text = {name: public.decode() for name, public in pins.items()}
                write_private(self._file, msgspec.json.format(msgspec.json.encode(text)))
                self.refresh()
        finally:
            os.close(lock)


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
