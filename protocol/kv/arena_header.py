"""The first page of a KV arena: the model, the layout, the number of committed tokens and their checksum.

Pure. Every number is checked against its bound before it is used.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from protocol.errors import PipelineError
from protocol.messages.base import MAX_CONTEXT

HEADER_BYTES = 4096
"""K begins on the next page."""
_MAGIC = b"LPKVAREN"
_VERSION = 2
_HEADS_FIRST = 1
"""K, then V, each (layers, kv heads, capacity, head size), contiguous: the order of mlx-lm's caches."""
_FIELDS = struct.Struct("<8s6I3Q32sQ")
_CHECKSUM = struct.Struct("<I")


class ArenaError(PipelineError):
    """An arena can't be used here; the tokens have to be prefilled again."""


class ArenaDamaged(ArenaError):
    """The bytes are no whole arena: of another format, torn by a crash, or hostile."""


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


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Shape of the keys, and equally of the values."""

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
                raise ArenaDamaged(f"A KV arena can't have {getattr(self, name):,} {name}: 1 to {most:,} are allowed.")

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


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """The contents of the first page."""

    layout: ArenaLayout
    epoch: int
    """The pipeline run in which the arena was written; in [0, 2^64)."""
    model: bytes
    """32 bytes; see `model_key`."""
    committed: int
    """The first so many tokens have whole keys and values."""
    checksum: int
    """XXH3 of the committed tokens' keys and values; see ArenaChecksum."""


def model_key(fingerprint: str) -> bytes:
    """A model's fingerprint, whatever its form, as 32 bytes."""
    return hashlib.sha256(fingerprint.encode()).digest()


def encode_header(header: ArenaHeader) -> bytes:
    """The header with its own CRC-32 behind it."""
    layout = header.layout
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        _HEADS_FIRST,
        layout.dtype,
        layout.layers,
        layout.kv_heads,
        layout.head_size,
        layout.capacity,
        header.epoch,
        header.committed,
        header.model,
        header.checksum,
    )
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def decode_header(page: bytes, segment_bytes: int) -> ArenaHeader:
    """The header of a segment of `segment_bytes` (which may be rounded up to whole pages).

    Raises ArenaDamaged if the bytes are no header or promise more than the segment holds, and
    ArenaMismatch for another version or layout of this format.
    """
    fields, checksum = page[: _FIELDS.size], page[_FIELDS.size : _FIELDS.size + _CHECKSUM.size]
    if len(checksum) < _CHECKSUM.size or not fields.startswith(_MAGIC):
        raise ArenaDamaged("A shared-memory segment is no KV arena: prefill the prompt again.")
    if _CHECKSUM.unpack(checksum) != (zlib.crc32(fields),):
        raise ArenaDamaged("A KV arena's header is torn (its writer ended in the middle): prefill the prompt again.")
    _, version, order, dtype, layers, heads, size, capacity, epoch, committed, model, body = _FIELDS.unpack(fields)
    if (version, order) != (_VERSION, _HEADS_FIRST):
        raise ArenaMismatch(f"A KV arena has version {version}, layout {order}: run the same release on both sides.")
    if dtype not in iter(ElementType):
        raise ArenaDamaged(f"A KV arena has the unknown element type {dtype}: prefill the prompt again.")
    layout = ArenaLayout(layers, heads, capacity, size, ElementType(dtype))
    if layout.segment_bytes > segment_bytes or committed > capacity:
        raise ArenaDamaged("A KV arena's header promises more than its segment holds: prefill the prompt again.")
    return ArenaHeader(layout, epoch, model, committed, body)
