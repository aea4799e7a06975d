"""The KV arena: keys and values of one sequence in shared memory, which another process can adopt.

One writer at a time. Knows arrays only, no model and no cache class; see `arena_header` for the format and `segments`
for the lifetime of the memory.
"""

import mmap
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import xxhash
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.kv.arena_header import (
    HEADER_BYTES,
    ArenaDamaged,
    ArenaHeader,
    ArenaLayout,
    ArenaMismatch,
    decode_header,
    encode_header,
    model_key,
)
from protocol.kv.segments import create_segment, open_segment, unlink_segment

LayerRows: TypeAlias = list[NDArray[Any]]
"""One array (kv heads, rows, head size) a layer, of an arena's element type."""


class Arena:
    """A header, then K, then V: `keys` and `values` are views (layers, kv heads, capacity, head size)."""

    def __init__(self, name: str, memory: Any, header: ArenaHeader) -> None:
        """Use create, attach or adopt."""
        self.name = name
        self._memory = memory
        self._header = header
        self._checksum = ArenaChecksum()
        half = header.layout.half_bytes
        self.keys = self._view(HEADER_BYTES)
        self.values = self._view(HEADER_BYTES + half)

    @classmethod
    def create(cls, layout: ArenaLayout, *, fingerprint: str, epoch: int, owner: int | None = None) -> "Arena":
        """A new arena without committed tokens, at its full size.

        `owner` is the process after whose end the arena is unlinked (default: this one). If that is the orchestrator,
        the arena outlives the worker that writes it.
        """
        header = ArenaHeader(layout, epoch, model_key(fingerprint), committed=0, checksum=0)
        name, memory = create_segment(layout.segment_bytes, owner)
        memory[:HEADER_BYTES] = encode_header(header).ljust(HEADER_BYTES, b"\0")
        return cls(name, memory, header)

    @classmethod
    def attach(cls, name: str) -> "Arena":
        """An existing arena, unchecked except for its header. Raises ArenaError or SegmentError; reads no K or V."""
        memory = open_segment(name)
        return cls(name, memory, decode_header(memory[:HEADER_BYTES], len(memory)))

    @classmethod
    def adopt(cls, name: str, layout: ArenaLayout, *, fingerprint: str, epoch: int, tokens: int = 0) -> "Arena":
        """An existing arena, checked: raises ArenaError unless it is what the caller expects, and whole.

        Its capacity may differ from that of `layout`, but it must hold at least `tokens` committed tokens.
        Raises SegmentError if no segment has this name.
        """
        arena = cls.attach(name)
        try:
            arena._require(layout, fingerprint, epoch)
            arena._require_whole(tokens)
        except (ArenaMismatch, ArenaDamaged):
            arena.close()
            raise
        return arena

    @property
    def layout(self) -> ArenaLayout:
        return self._header.layout

    @property
    def body(self) -> NDArray[Any]:
        """Keys and values as one view, (2 layers, kv heads, capacity, head size): keys of every layer first."""
        layers, *rest = self.layout.shape
        flat = np.frombuffer(self._memory, self.layout.dtype.numpy_name, 2 * self.keys.size, HEADER_BYTES)
        return flat.reshape(2 * layers, *rest)

    @property
    def committed(self) -> int:
        """Committed tokens, as of this process's attach or its own last commit."""
        return self._header.committed

    def write_rows(self, start: int, keys: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> None:
        """Write rows from token `start` on: one array (kv heads, rows, head size) for each layer, of the arena's dtype.

        No reader uses them until they are committed. Committed rows can't be overwritten: commit fewer first.
        """
        assert len(keys) == len(values) == self.layout.layers
        stop = start + keys[0].shape[1]
        assert self.committed <= start <= stop <= self.layout.capacity
        for half, layers in ((self.keys, keys), (self.values, values)):
            for layer, rows in enumerate(layers):
                assert rows.dtype == half.dtype
                half[layer, :, start:stop] = rows

    def touch(self, begin: int, end: int) -> None:
        """Let the system find memory for the rows of tokens [begin, end) now: it gives pages one by one as they are
        first read or written, which takes longer than to write them. What they hold stays, so another thread may write
        or read meanwhile."""
        # NumPy copies without the interpreter's lock; a sum would keep it, and the target's next forward would wait.
        for half in (self.keys, self.values):
            if half.size:  # the arena may have been closed
                half[:, :, begin : end : max(1, mmap.PAGESIZE // half.strides[2]), 0].copy()

    def commit(self, length: int) -> None:
        """Make the first `length` tokens the committed ones."""
        assert 0 <= length <= self.layout.capacity
        if length < self._checksum.length:
            self._checksum = ArenaChecksum()
        checksum = self._checksum.extend(self.keys, self.values, length)
        self._header = replace(self._header, committed=length, checksum=checksum)
        encoded = encode_header(self._header)
        self._memory[: len(encoded)] = encoded

    def close(self) -> None:
        """Unmap the memory, once the caller's own views of it are gone too. The segment stays."""
        self.keys = self.values = np.empty(0)
        try:
            self._memory.close()
        except BufferError:
            # A view is still in use; the memory is unmapped with it.
            return

    def unlink(self) -> None:
        """Remove the segment's name: no process can attach any more, and the memory is freed after its last use."""
        unlink_segment(self.name)

    def _view(self, offset: int) -> NDArray[Any]:
        layout = self._header.layout
        count = layout.half_bytes // layout.dtype.size
        flat = np.frombuffer(self._memory, layout.dtype.numpy_name, count, offset)
        return flat.reshape(layout.shape)

    def _require(self, layout: ArenaLayout, fingerprint: str, epoch: int) -> None:
        wanted = replace(layout, capacity=self.layout.capacity), model_key(fingerprint), epoch
        if (self.layout, self._header.model, self._header.epoch) != wanted:
            raise ArenaMismatch(f"KV arena {self.name} is of another model or another pipeline: prefill again.")

    def _require_whole(self, tokens: int) -> None:
        if self.committed < tokens:
            raise ArenaMismatch(
                f"KV arena {self.name} holds {self.committed:,} tokens, {tokens:,} are wanted: prefill again."
            )
        if self._checksum.extend(self.keys, self.values, self.committed) != self._header.checksum:
            raise ArenaDamaged(f"KV arena {self.name} is torn (its checksum is wrong): prefill again.")


class ArenaChecksum:
    """XXH3 over the first rows of each (layer, kv head) stripe of K and of V; it grows with the committed tokens.

    A stripe's rows are contiguous, so hashing takes about as long as reading the memory. The checksum does not depend
    on how many rows were added at a time.
    """

    def __init__(self) -> None:
        self.length = 0
        """Rows hashed so far, of every stripe."""
        self._stripes: list[xxhash.xxh3_64] = []

    def extend(self, keys: NDArray[Any], values: NDArray[Any], length: int) -> int:
        """The 64-bit checksum of the first `length` rows of two (layers, kv heads, capacity, head size)
        arrays, whose first `self.length` rows were hashed before. Without rows it is 0."""
        assert length >= self.length
        if not length:
            return 0
        stripes = [stripe for half in (keys, values) for layer in half for stripe in layer]
        self._stripes = self._stripes or [xxhash.xxh3_64() for _ in stripes]
        for stripe, hashed in zip(stripes, self._stripes, strict=True):
            hashed.update(stripe[self.length : length].data)
        self.length = length
        digests = np.array([hashed.intdigest() for hashed in self._stripes], dtype=np.uint64)
        return xxhash.xxh3_64_intdigest(digests.data)
