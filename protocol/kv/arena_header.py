"""The first page of a KV arena: the model, the layout, the number of committed tokens and their checksum.

Pure. Every number is checked against its bound before it is used.
"""

import hashlib
import struct
import zlib
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from protocol.errors import PipelineError
from protocol.messages.base import MAX_CONTEXT

HEADER_BYTES = 4096
"""K begins on the next page."""
_MAGIC = b"LPKVAREN"
_SEAL = struct.Struct("<8sII")
"""In front of a header's msgpack: magic, bytes of it, their CRC-32."""
_Header = TypeVar("_Header")


class ArenaError(PipelineError):
    """An arena can't be used here; the tokens have to be prefilled again."""


class ArenaDamaged(ArenaError):
    """The bytes are no whole arena of this release: torn by a crash, or hostile."""


class ArenaMismatch(ArenaError):
    """A whole arena, but of another model, layout or epoch."""


class ElementType(IntEnum):
    """What K and V are made of. numpy has no bfloat16: its arrays are the bits, as uint16."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3

    @property
    def numpy_name(self) -> str:
        return {1: "float16", 2: "uint16", 3: "float32"}[self]

    @property
    def size(self) -> int:
        """Bytes an element."""
        return 4 if self is ElementType.FLOAT32 else 2


class ArenaLayout(msgspec.Struct, frozen=True):
    """Shape of the keys, and equally of the values. K, then V, each contiguous: the order of mlx-lm's caches."""

    layers: int
    kv_heads: int
    capacity: int
    """Tokens that fit."""
    head_size: int
    dtype: ElementType

    def __post_init__(self) -> None:
        bounds = {"layers": 1024, "kv_heads": 1024, "capacity": MAX_CONTEXT, "head_size": 4096}
        for name, most in bounds.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"a KV arena can't have {getattr(self, name):,} {name}: 1 to {most:,} are allowed")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.layers, self.kv_heads, self.capacity, self.head_size

    @property
    def half_bytes(self) -> int:
        """Bytes of K, and of V."""
        return self.layers * self.kv_heads * self.capacity * self.head_size * self.dtype.size

    @property
    def segment_bytes(self) -> int:
        return HEADER_BYTES + 2 * self.half_bytes


class ArenaHeader(msgspec.Struct, frozen=True):
    """The contents of the first page."""

    layout: ArenaLayout
    epoch: int
    """The pipeline run in which the arena was written; in [0, 2^64)."""
    model: bytes
    """32 bytes; see `model_key`."""
    committed: Annotated[int, Meta(ge=0)]
    """The first so many tokens have whole keys and values."""
    checksum: int
    """XXH3 of the committed tokens' keys and values; see ArenaChecksum."""


def model_key(fingerprint: str) -> bytes:
    """A model's fingerprint, whatever its form, as 32 bytes."""
    return hashlib.sha256(fingerprint.encode()).digest()


def sealed(magic: bytes, header: object) -> bytes:
    """A first page of shared memory, which a reader finds whole or torn."""
    body = msgspec.msgpack.encode(header)
    return _SEAL.pack(magic, len(body), zlib.crc32(body)) + body


def unsealed(magic: bytes, page: bytes, form: type[_Header], name: str) -> _Header:
    """Raises ValueError with a clause if the bytes are no such header."""
    if len(page) < _SEAL.size or not page.startswith(magic):
        raise ValueError(f"A shared-memory segment is no {name}")
    _, length, checksum = _SEAL.unpack_from(page)
    body = page[_SEAL.size : _SEAL.size + length]
    if zlib.crc32(body) != checksum:
        raise ValueError(f"The header of a {name} is torn (its writer is writing it, or ended in the middle)")
    try:
        return msgspec.msgpack.decode(body, type=form)
    except msgspec.MsgspecError as error:
        raise ValueError(f"The header of a {name} is of another release ({error})") from error


def encode_header(header: ArenaHeader) -> bytes:
    return sealed(_MAGIC, header)


def decode_header(page: bytes, segment_bytes: int) -> ArenaHeader:
    """The header of a segment of `segment_bytes` (which may be rounded up to whole pages).

    Raises ArenaDamaged if the bytes are no header or promise more than the segment holds.
    """
    try:
        header = unsealed(_MAGIC, page, ArenaHeader, "KV arena")
        if header.layout.segment_bytes > segment_bytes or header.committed > header.layout.capacity:
            raise ValueError("A KV arena's header promises more than its segment holds")
    except ValueError as error:
        raise ArenaDamaged(f"{error}: prefill the prompt again.") from error
    return header
