"""What a hostile machine may send: frames damaged on purpose, and bytes that never were a frame. Seeded."""

import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgpack

_GREETING = b"\xff" + bytes(7) + b"\x01\x7f"
_NUMBERS = (0, 1, -1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, float("nan"), float("inf"), -0.0, 1e308)
_ODDITIES = (None, True, "", "\x1b[2J", b"\x00", [], {}, [[]], {"type": "grow"}, "x" * 5000)


def mutations(frames: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Without end: half have other bytes, half have other values where the structure stays whole."""
    source = random.Random(seed)
    while True:
        frame = source.choice(frames)
        yield _damaged(frame, source) if source.random() < 0.5 else _altered(frame, source)


def blobs(seed: int) -> Iterator[bytes]:
    """Without end: noise, half greetings, greetings for other mechanisms, commands that lie about their length."""
    source = random.Random(seed)
    while True:
        mechanism = source.choice((b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20)).ljust(20, b"\x00")
        version = source.choice((b"\x03\x00", b"\x03\x01", b"\x01", b"\x00", b"\xff\xff"))
        greeting = _GREETING + version + mechanism + source.choice((b"\x00", b"\x01")) + bytes(31)
        noise = source.randbytes(source.choice((0, 1, 9, 64, 300, 5000)))
        yield source.choice(
            (
                noise,
                greeting[: source.randrange(len(greeting))],
                greeting + noise,
                greeting + _command(source) + noise,
                greeting + _hello(source),
                b"\x00" * source.randrange(200),
                b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                _GREETING[:1] + b"\xff" * 8 + b"\x7f" + noise,
            )
        )


def throw(port: int, blob: bytes) -> None:
    """Send to a TCP port, and be gone without a farewell, so that no port of ours stays taken."""
    with socket.socket() as thrower:
        thrower.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        thrower.settimeout(10.0)
        thrower.connect(("127.0.0.1", port))
        # The hub may have hung up already.
        with suppress(ConnectionError):
            thrower.sendall(blob)


def _damaged(frame: bytes, source: random.Random) -> bytes:
    damaged = bytearray(frame)
    for _ in range(source.randint(1, 6)):
        match source.randrange(4):
            case 0:
                damaged[source.randrange(len(damaged))] = source.randrange(256)
            case 1:
                del damaged[source.randrange(len(damaged)) :]
            case 2:
                damaged += source.randbytes(source.randrange(1, 20))
            case _:
                begin = source.randrange(len(damaged))
                damaged[begin:begin] = damaged[begin : begin + source.randrange(1, 40)]
        if not damaged:
            return b""
    return bytes(damaged)


def _altered(frame: bytes, source: random.Random) -> bytes:
    """One value is another: the frame may be a message, and a lie."""
    envelope: list[Any] = msgpack.unpackb(frame)
    body: dict[str, Any] = envelope[3]
    key = source.choice(list(body))
    match source.randrange(6):
        case 0:
            body[key] = source.choice(_NUMBERS)
        case 1:
            body[key] = source.choice(_ODDITIES)
        case 2:
            del body[key]
        case 3:
            body[str(source.choice(_ODDITIES))] = 1
        case 4 if isinstance(body[key], list) and body[key]:
            body[key] = body[key] * source.choice((1, 3, 2000))
            body[key][source.randrange(len(body[key]))] = source.choice((*_NUMBERS, *_ODDITIES))
        case _:
            near = isinstance(body[key], int | float) and not isinstance(body[key], bool)
            body[key] = body[key] + source.choice((-2, -1, 1, 2, 100)) if near else source.choice(_NUMBERS)
    with suppress(OverflowError):
        return msgpack.packb(envelope) or b""
    return frame


def _command(source: random.Random) -> bytes:
    """A ZMTP frame whose length is not that of what follows."""
    flags = source.choice((0x00, 0x01, 0x02, 0x04, 0x06, 0xFF))
    if flags & 0x02:
        return bytes([flags]) + source.choice((0, 1, 1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1)).to_bytes(8, "big")
    return bytes([flags, source.randrange(256)])


def _hello(source: random.Random) -> bytes:
    """The first CURVE command, of the right length or nearly, with a key and a box of noise."""
    content = b"\x05HELLO" + b"\x01\x00" + bytes(72) + source.randbytes(source.choice((120, 119, 121, 0)))
    return bytes([0x04, len(content) & 0xFF]) + content
