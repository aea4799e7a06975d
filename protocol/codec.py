"""Messages to bytes and back, with every size bounded before anything is built from it."""

from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec

from protocol.errors import WireError
from protocol.messages import MAX_CONTEXT, VERSION, Message

MAX_FRAME = 16 << 20
"""Bytes. A Start with a million tokens is the largest message; control traffic stays under 64 KiB."""
MAX_WORKER_FRAME = 1 << 20
"""Bytes of the largest frame that comes from a worker: a full Grow with all its distributions has 0.95 MiB."""
_MAX_MAP = 64

M = TypeVar("M")


class Stamp(NamedTuple):
    """Which life of the orchestrator (epoch) and of the worker (incarnation) a message belongs to."""

    epoch: int
    incarnation: int


def encode(message: Message, stamp: Stamp) -> bytes:
    """One frame: [version, epoch, incarnation, body]."""
    frame = msgpack.packb([VERSION, stamp.epoch, stamp.incarnation, msgspec.to_builtins(message)])
    assert frame is not None
    return frame


def decode(frame: bytes, expected: type[M] | Any, limit: int = MAX_FRAME) -> tuple[Stamp, M]:
    """The stamp and the message of a frame, validated against the union `expected`.

    Raises WireError for anything else: too large, not msgpack, another version, a wrong field.
    """
    if len(frame) > limit:
        raise WireError(f"A peer sent a frame of {len(frame):,} bytes; the limit is {limit:,}.")
    try:
        parts = msgpack.unpackb(
            frame,
            max_str_len=limit,
            max_bin_len=0,
            max_array_len=MAX_CONTEXT,
            max_map_len=_MAX_MAP,
            max_ext_len=0,
        )
        version, epoch, incarnation, body = parts
        if version != VERSION:
            raise WireError(
                f"A peer speaks protocol version {version!r}, this side {VERSION}: install the same release on both."
            )
        if not (isinstance(epoch, int) and isinstance(incarnation, int)):
            raise WireError("A peer sent a frame without a proper stamp.")
        return Stamp(epoch, incarnation), msgspec.convert(body, expected)
    except (ValueError, TypeError, RecursionError, msgspec.ValidationError, msgpack.UnpackException) as error:
        raise WireError(f"A peer sent a frame that this protocol does not allow: {error}.") from error
