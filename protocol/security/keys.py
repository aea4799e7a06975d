"""CURVE keys, and the join line that gives another machine a one-time key. Knows no sockets."""

import base64
import hashlib
import json
import secrets
import struct
from binascii import Error as Base64Error
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from protocol.errors import InputError
from protocol.security.addresses import tcp_address
from protocol.security.private_files import private_folder, read_private, write_private

_LEAST_CHARACTERS = 32


def ranks_key(hosts_file: str) -> bytes:
    """Raises InputError if the file has no key or a short one, or if other users can read it."""
    try:
        content = read_private(Path(hosts_file))
    except InputError as error:
        raise InputError(
            f"The hosts file {hosts_file} holds a key, so it must be yours, and no other user may read it: run "
            f"`chmod 600 {hosts_file}`, and write another key if somebody could read this one."
        ) from error
    try:
        key = json.loads(content or b"")["key"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"The hosts file {hosts_file} has no key any more: give every host the same file.") from error
    if not isinstance(key, str) or len(key) < _LEAST_CHARACTERS:
        raise InputError(
            f"The key in the hosts file {hosts_file} is no text of {_LEAST_CHARACTERS} random characters or more: "
            "write a longer one."
        )
    return key.encode()


_KEY_BYTES = 32
_FILE = "curve.key"
_PREFIX = "lp1"
_PERSON = b"lp-guest-v1"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Curve25519, each half in Z85: 40 ASCII bytes."""

    public: bytes
    secret: bytes = field(repr=False)


def own_keys(folder: Path) -> KeyPair:
    """The keys in `folder`, made at the first call. Raises InputError if other users could read or change them."""
    file = private_folder(folder) / _FILE
    stored = read_private(file)
    if stored is None:
        _, secret = zmq.curve_keypair()
        # Another process may have written the file first: its key counts.
        write_private(file, secret, replace=False)
        stored = read_private(file) or b""
    if not is_key(stored):
        raise InputError(
            f"{file} holds no valid key: remove it, and a new one is made (other machines then need a new join line)."
        )
    return KeyPair(zmq.curve_public(stored), stored)


def is_key(text: bytes) -> bool:
    """Whether `text` is 32 bytes in Z85."""
    if len(text) != 40:
        return False
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False


def one_time_keys(secret: bytes) -> KeyPair:
    """The one-time keys that are derived from an invitation's secret; the secret itself is never sent.

    A Curve25519 secret may be any 32 bytes: the scalar multiplication clamps it (RFC 7748, section 5).
    """
    derived = z85.encode(hashlib.blake2b(key=secret, digest_size=_KEY_BYTES, person=_PERSON).digest())
    return KeyPair(zmq.curve_public(derived), derived)


@dataclass(frozen=True, slots=True)
class JoinLine:
    """A server's address, its public key, and a secret that admits one machine once.

    One word without special characters of a shell: `lp1:HOST:PORT:KEY:SECRET`.
    """

    host: str
    port: int
    server: bytes
    """The public key, Z85."""
    secret: bytes = field(repr=False)
    """32 random bytes; see `new_secret`."""

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.host}:{self.port}:{_word(z85.decode(self.server))}:{_word(self.secret)}"

    @property
    def address(self) -> str:
        return tcp_address(self.host, self.port)

    def one_time_keys(self) -> KeyPair:
        return one_time_keys(self.secret)

    @classmethod
    def parse(cls, text: str) -> "JoinLine":
        """Raises InputError that names the fault. Blanks and line breaks from copying are ignored."""
        word = "".join(text.split())
        prefix, _, rest = word.partition(":")
        if prefix != _PREFIX:
            raise InputError(f"A join line begins with {_PREFIX}: and this one does not: copy the whole line.")
        # From the right, because an IPv6 host holds colons.
        parts = rest.rsplit(":", 3)
        if len(parts) != 4:
            raise InputError(f"This join line lacks a part of {_PREFIX}:HOST:PORT:KEY:SECRET: copy the whole line.")
        host, port, server, secret = parts
        host = host.removeprefix("[").removesuffix("]")
        number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
        tcp_address(host, number)
        return cls(host, number, z85.encode(_bytes(server, "server's key")), _bytes(secret, "secret"))


def new_secret() -> bytes:
    return secrets.token_bytes(_KEY_BYTES)


def _word(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _bytes(word: str, what: str) -> bytes:
    try:
        content = base64.b64decode(word + "=", altchars=b"-_", validate=True)
    except (Base64Error, ValueError):
        content = b""
    if len(content) != _KEY_BYTES:
        raise InputError(
            f"The {what} in this join line is incomplete (43 letters, digits, - and _): copy the line again."
        )
    return content
