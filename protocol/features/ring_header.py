"""The first page of a feature ring: the model, which outputs its rows hold, and which tokens' rows are there.

Pure. Every number is checked against its bound before it is used.
"""

import struct
import zlib
from dataclasses import dataclass

import msgspec

from protocol.errors import PipelineError
from protocol.kv.arena_header import ElementType
from protocol.messages.base import MAX_CONTEXT
from protocol.messages.features import MAX_OUTPUTS, FeatureForm, Projection

HEADER_BYTES = 4096
"""The rows' checksums begin on the next page."""
CHECKSUM_BYTES = 8
"""Of each row."""
LEAST_ROWS = 512 + 64
"""Fewest rows of a ring: a chunk of a prompt, and a tree behind it."""
_MOST_BYTES = 64 << 20
"""Of all rows, if so many bytes hold LEAST_ROWS."""
_MAGIC = b"LPFEATUR"
_VERSION = 2
_FIELDS = struct.Struct(f"<8s5I5Q32s{MAX_OUTPUTS}i")
_CHECKSUM = struct.Struct("<I")
_NONE = Projection(0, 0)
"""Rows that are not projected."""


class RingError(PipelineError):
    """A segment is no feature ring that can be used here; a draft goes on without features."""


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Shape of a ring: `capacity` rows, each with the outputs of `form` in `element`."""

    form: FeatureForm
    element: ElementType
    capacity: int
    """Row of the token at position p is at p mod capacity."""

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MAX_CONTEXT:
            raise RingError(f"A feature ring can't have {self.capacity:,} rows: 1 to {MAX_CONTEXT:,} are allowed.")

    @property
    def row_elements(self) -> int:
        return self.form.elements

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.element.size

    @property
    def rows_begin(self) -> int:
        """Offset of the first row in the segment; the checksums are between the header and the rows."""
        return HEADER_BYTES + self.capacity * CHECKSUM_BYTES

    @property
    def segment_bytes(self) -> int:
        return self.rows_begin + self.capacity * self.row_bytes


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The contents of the first page."""

    layout: RingLayout
    epoch: int
    """The pipeline run in which the ring was written; in [0, 2^64)."""
    model: bytes
    """32 bytes; see `model_key`."""
    begin: int = 0
    """Position of the first token since whose row none was left out."""
    committed: int = 0
    """Position behind the last token that has a row."""

    @property
    def available(self) -> range:
        """Positions of the tokens whose rows are in the ring."""
        return range(max(self.begin, self.committed - self.layout.capacity), self.committed)


def affordable_layout(form: FeatureForm, element: ElementType, capacity: int) -> RingLayout:
    """A ring of at most `capacity` rows and 64 MiB, but of LEAST_ROWS rows if they are wider than that allows."""
    affordable = _MOST_BYTES // (form.elements * element.size)
    return RingLayout(form, element, min(capacity, max(LEAST_ROWS, affordable)))


def encode_header(header: RingHeader) -> bytes:
    """The header with its own CRC-32 behind it."""
    layout = header.layout
    outputs, projection = layout.form.outputs, layout.form.projection or _NONE
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        layout.element,
        len(outputs),
        layout.form.width,
        projection.width,
        layout.capacity,
        projection.key,
        header.epoch,
        header.begin,
        header.committed,
        header.model,
        *outputs,
        *[0] * (MAX_OUTPUTS - len(outputs)),
    )
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def decode_header(page: bytes, segment_bytes: int) -> RingHeader:
    """The header of a segment of `segment_bytes` (which may be rounded up to whole pages). Raises RingError if the
    bytes are no header, or promise more than the segment holds."""
    fields, checksum = page[: _FIELDS.size], page[_FIELDS.size : _FIELDS.size + _CHECKSUM.size]
    if len(checksum) < _CHECKSUM.size or not fields.startswith(_MAGIC):
        raise RingError("A shared-memory segment is no feature ring.")
    if _CHECKSUM.unpack(checksum) != (zlib.crc32(fields),):
        raise RingError("A feature ring's header is torn: its writer is writing it, or ended in the middle.")
    _, version, element, count, width, projected, capacity, *rest = _FIELDS.unpack(fields)
    key, epoch, begin, committed, model, *outputs = rest
    if version != _VERSION:
        raise RingError(f"A feature ring has version {version}: run the same release on both sides.")
    if element not in iter(ElementType):
        raise RingError(f"A feature ring has the unknown element type {element}.")
    layout = RingLayout(_form(outputs[:count], width, projected, key), ElementType(element), capacity)
    if layout.segment_bytes > segment_bytes or not begin <= committed <= MAX_CONTEXT:
        raise RingError("A feature ring's header promises more than its segment holds.")
    return RingHeader(layout, epoch, model, begin, committed)


def _form(outputs: list[int], width: int, projected: int, key: int) -> FeatureForm:
    projection = {"width": projected, "key": key} if projected else None
    try:
        return msgspec.convert({"outputs": outputs, "width": width, "projection": projection}, FeatureForm)
    except msgspec.ValidationError as error:
        raise RingError(f"A feature ring's header names impossible outputs ({error}).") from error
