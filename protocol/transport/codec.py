"""Messages to bytes and back, as msgpack. A frame is decoded directly into the message types of its direction, so that
no other object is ever built from received bytes."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import msgspec

from protocol.errors import WireError
from protocol.messages.base import VERSION, Message

_pack: Callable[[object], bytes] = import_module("msgpack").packb
MAX_FRAME = 16 << 20
"""Bytes. A Start with a million tokens is the largest message; control traffic stays under 64 KiB."""
MAX_WORKER_FRAME = 1 << 20
"""Bytes of the largest frame from a worker: a full Grow with all its distributions has 0.95 MiB."""

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
