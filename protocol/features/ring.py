"""The feature ring: hidden states of one sequence's latest tokens in shared memory, which drafts read.

Its first page says which model, which outputs its rows hold, and which tokens' rows are there; every number is checked
against its bound before it is used. One writer, any number of readers, and no lock: a reader notices if a row was
overwritten while it copied. See `protocol.kv.segments` for the lifetime of the memory.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.errors import PipelineError
from protocol.features.blocks import Rows, as_float32, chosen
from protocol.kv.arena_header import ElementType, model_key, sealed, unsealed
from protocol.kv.segments import create_segment, open_segment, unlink_segment
from protocol.messages.base import MAX_CONTEXT
from protocol.messages.features import FeatureForm

_ROWS = 4096
"""Of a ring, unless its rows are wide."""
_ATTEMPTS = 3
"""A torn header is read so often: its writer needs about a microsecond."""
HEADER_BYTES = 4096
"""The rows' checksums begin on the next page."""
CHECKSUM_BYTES = 8
"""Of each row."""
LEAST_ROWS = 512 + 64
"""Fewest rows of a ring: a chunk of a prompt, and a tree behind it."""
_MOST_BYTES = 64 << 20
"""Of all rows, if so many bytes hold LEAST_ROWS."""
_MAGIC = b"LPFEATUR"


class RingError(PipelineError):
    """A segment is no feature ring that can be used here; a draft goes on without features."""


class RingLayout(msgspec.Struct, frozen=True):
    """Shape of a ring: `capacity` rows, each with the outputs of `form` in `element`."""

    form: FeatureForm
    element: ElementType
    capacity: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    """Row of the token at position p is at p mod capacity."""

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


class RingHeader(msgspec.Struct, frozen=True):
    """The contents of the first page."""

    layout: RingLayout
    epoch: int
    """The pipeline run in which the ring was written; in [0, 2^64)."""
    model: bytes
    """32 bytes; see `model_key`."""
    begin: Annotated[int, Meta(ge=0)] = 0
    """Position of the first token since whose row none was left out."""
    committed: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] = 0
    """Position behind the last token that has a row."""

    @property
    def available(self) -> range:
        """Positions of the tokens whose rows are in the ring."""
        return range(max(self.begin, self.committed - self.layout.capacity), self.committed)


class FeatureRing:
    """A header, then a checksum a row, then the rows."""

    def __init__(self, name: str, memory: Any, header: RingHeader) -> None:
        """Use create or attach."""
        self.name = name
        self._memory = memory
        self._header = header
        layout = header.layout
        self._sums = np.frombuffer(memory, np.uint64, layout.capacity, HEADER_BYTES)
        """XXH3 of each row, seeded with the position of its token."""
        count = layout.capacity * layout.row_elements
        flat = np.frombuffer(memory, layout.element.numpy_name, count, layout.rows_begin)
        self._rows = flat.reshape(layout.capacity, layout.row_elements)

    @classmethod
    def create(
        cls,
        form: FeatureForm,
        element: ElementType,
        *,
        fingerprint: str,
        epoch: int,
        owner: int | None = None,
        capacity: int = _ROWS,
    ) -> "FeatureRing":
        """A ring without rows, of `capacity` rows or as many as 64 MiB hold. Raises SegmentError.

        `owner` is the process after whose end the ring is unlinked (default: this one).
        """
        header = RingHeader(affordable_layout(form, element, capacity), epoch, model_key(fingerprint))
        name, memory = create_segment(header.layout.segment_bytes, owner)
        memory[:HEADER_BYTES] = encode_header(header).ljust(HEADER_BYTES, b"\0")
        return cls(name, memory, header)

    @classmethod
    def attach(cls, name: str) -> "FeatureRing":
        """An existing ring. Raises RingError or SegmentError."""
        memory = open_segment(name)
        return cls(name, memory, _header(memory))

    @property
    def layout(self) -> RingLayout:
        return self._header.layout

    @property
    def form(self) -> FeatureForm:
        """Which outputs a row holds."""
        return self.layout.form

    @property
    def epoch(self) -> int:
        return self._header.epoch

    @property
    def available(self) -> range:
        """Positions of the tokens whose rows are there now; empty if the ring is unusable."""
        return range(0) if (header := self._current()) is None else header.available

    def write(self, first: int, rows: Rows) -> None:
        """Append the rows of the tokens from position `first` on, of the ring's element type.

        Positions may be left out: then no row before `first` is available any more.
        """
        header = self._header
        stop = first + len(rows)
        assert header.committed <= first <= stop <= MAX_CONTEXT
        assert rows.dtype == self._rows.dtype
        assert rows.shape[1:] == self._rows.shape[1:]
        # A reader must learn that rows go before they are overwritten: otherwise it takes them for damaged.
        kept = min(header.committed, max(header.begin, stop - self.layout.capacity))
        self._publish(replace(header, begin=kept))
        for position in range(max(first, stop - self.layout.capacity), stop):
            slot, row = position % self.layout.capacity, np.ascontiguousarray(rows[position - first])
            self._rows[slot] = row
            self._sums[slot] = _checksum(row, position)
        begin = header.begin if first == header.committed else first
        self._publish(replace(header, begin=max(begin, kept), committed=stop))

    def read(self, first: int, count: int, outputs: Sequence[int]) -> NDArray[np.float32] | None:
        """(count, len(outputs) * width): the features of the tokens from position `first` on, in that order of outputs.

        None if not all of them are there, whole and finite; see also `copied`.
        """
        rows = self.copied(first, count, outputs)
        return None if rows is None else as_float32(rows, self.layout.element)

    def copied(self, first: int, count: int, outputs: Sequence[int]) -> Rows | None:
        """The same in the ring's element type. None for rows that the ring does not hold, holds no longer, or that are
        being overwritten, and for outputs that it does not hold."""
        if not self._holds(first, count):
            return None
        slots = np.arange(first, first + count) % self.layout.capacity
        sums, rows = self._sums[slots], self._rows[slots]
        whole = all(_checksum(row, first + index) == sums[index] for index, row in enumerate(rows))
        # The checksums say that the rows are whole, the header that nothing was left out or begun anew meanwhile.
        return chosen(rows, self.form, outputs) if whole and self._holds(first, count) else None

    def close(self) -> None:
        """Unmap the memory. The segment stays."""
        self._sums = self._rows = np.empty(0)
        self._memory.close()

    def unlink(self) -> None:
        """Remove the segment's name: no process can attach any more, and the memory is freed after its last use."""
        unlink_segment(self.name)

    def _publish(self, header: RingHeader) -> None:
        self._header = header
        encoded = encode_header(header)
        self._memory[: len(encoded)] = encoded

    def _holds(self, first: int, count: int) -> bool:
        header = self._current()
        return header is not None and header.available.start <= first <= first + count <= header.committed

    def _current(self) -> RingHeader | None:
        """The header as it is now; None if it is torn or another ring's."""
        try:
            header = _header(self._memory)
        except RingError:
            return None
        own = self._header
        same = (header.layout, header.epoch, header.model) == (own.layout, own.epoch, own.model)
        return header if same else None


def _header(memory: Any) -> RingHeader:
    for _ in range(_ATTEMPTS - 1):
        with suppress(RingError):
            return decode_header(memory[:HEADER_BYTES], len(memory))
    return decode_header(memory[:HEADER_BYTES], len(memory))


def _checksum(row: NDArray[Any], position: int) -> int:
    """The row of another position that is in the same slot has another checksum."""
    return xxhash.xxh3_64_intdigest(row.data, position)


def affordable_layout(form: FeatureForm, element: ElementType, capacity: int) -> RingLayout:
    """A ring of at most `capacity` rows and 64 MiB, but of LEAST_ROWS rows if they are wider than that allows."""
    affordable = _MOST_BYTES // (form.elements * element.size)
    return RingLayout(form, element, min(capacity, max(LEAST_ROWS, affordable)))


def encode_header(header: RingHeader) -> bytes:
    return sealed(_MAGIC, header)


def decode_header(page: bytes, segment_bytes: int) -> RingHeader:
    """The header of a segment of `segment_bytes` (which may be rounded up to whole pages). Raises RingError if the
    bytes are no header, or promise more than the segment holds."""
    try:
        header = unsealed(_MAGIC, page, RingHeader, "feature ring")
    except ValueError as error:
        raise RingError(f"{error}.") from error
    if header.layout.segment_bytes > segment_bytes or header.begin > header.committed:
        raise RingError("A feature ring's header promises more than its segment holds.")
    return header
