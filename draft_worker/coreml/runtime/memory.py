"""The KV of a sequence: an fp32 array on the host.

Knows the package's cache and its slots; knows no logits and no tree.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from draft_worker.coreml.arrays import Array, Single, Slots
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.tree_slots import PackageRow, TreeSlots
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError, ArenaLayout, ArenaMismatch, ElementType
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.kv import KvReference


class CallRows(Protocol):
    """The rows that a call evaluates."""

    def row(self, number: int) -> PackageRow: ...

    def fill_mask(self, numbers: Sequence[int], mask: Single, window: int | None = None) -> None:
        """As `TreeSlots.fill_mask`."""
        ...


class CallMemory(Protocol):
    """The keys and values that a call reads and writes."""

    @property
    def slots(self) -> CallRows: ...

    def inputs(self, numbers: Sequence[int], buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        """All inputs of a call that evaluates these rows: the `buffers` of its function, completed, and the cache.

        No array is made for a call, because the runtime may read its inputs later (`apple.lend`).
        """
        ...

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """Store the keys and values of these rows, in this order, from the outputs of their call."""
        ...


class HostMemory:
    """The slots of a sequence, and an array in the package's layout, whose keys and values every call reads.

    It is fp32, because coremltools would copy an fp16 input to fp32 at every call.
    """

    def __init__(self, package: Package, cache: Single, kv: Single | None = None) -> None:
        """`cache`: in `Package.host_shape`. `kv`: the view of its keys and values that calls get, if there is one
        already; a call's inputs are never freed (`apple.lend`)."""
        self.slots = TreeSlots(package.context)
        self.kv = cache[: package.cache_shape[0]] if kv is None else kv
        self.stamps: Slots = np.zeros(package.context, np.intp)
        """By slot: another number after each change of its contents."""
        self._changes = 0
        self._cache = cache
        self._convolutions = ConvolutionHistory(package, cache) if package.shape.convolutions else None

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return self._cache.nbytes

    def inputs(self, numbers: Sequence[int], buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        if self._convolutions is not None:
            self._convolutions.fill(self.slots, numbers, buffers)
        return {**buffers, "kv": self.kv}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        self.write(self.slots.slots_of(numbers), outputs["kv_new"][:, :, : len(numbers)])

    def write(self, slots: Sequence[int], new: Single) -> None:
        """Store keys and values, (rows, key heads, slots, head), in these slots.

        What overflowed fp16 is stored as 0: 0 times infinity is no number, so that the row would also blind every token
        that the mask hides it from, and later requests in these slots.
        """
        self._cache[: len(new), :, slots] = np.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)
        self._changed(slots)

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the contents of two slots, pair after pair."""
        for one, other in pairs:
            self._cache[:, :, [one, other]] = self._cache[:, :, [other, one]]
            self._changed([one, other])

    def _changed(self, slots: Sequence[int]) -> None:
        self._changes += 1
        self.stamps[slots] = self._changes


class ConvolutionHistory:
    """The inputs that short convolutions need of a token's ancestors, kept by slot like keys and values.

    They are rows of one sequence's cache, which has `Package.host_shape`.
    """

    def __init__(self, package: Package, cache: Single) -> None:
        shape = package.shape
        begin = package.cache_shape[0]
        rows = cache[begin : begin + shape.sharing * shape.convolutions]
        self._rows = rows.reshape(shape.convolutions, -1, *rows.shape[2:])
        self._ancestors = shape.taps - 1

    def fill(self, slots: TreeSlots, numbers: Sequence[int], buffers: Mapping[str, Array]) -> None:
        """Fill the inputs `past` and `ancestors` of a call that evaluates these rows, in this order.

        An ancestor's input comes from its slot, or from the call itself, if the ancestor is one of its rows.
        """
        past, chosen = buffers["past"], buffers["ancestors"]
        past[:], chosen[:] = 0, 0
        column = {number: index for index, number in enumerate(numbers)}
        kept: list[tuple[int, int, int]] = []
        for index, number in enumerate(numbers):
            for distance, (row, slot) in enumerate(islice(slots.before(number), self._ancestors)):
                if row in column:
                    chosen[0, distance, column[row], index] = 1
                else:
                    kept.append((distance, index, slot))
        if kept:
            distances, columns, places = (list(each) for each in zip(*kept, strict=True))
            # (ancestors, convolutions, hidden): numpy puts the axis of two separated index lists first.
            inputs = np.moveaxis(self._rows[:, :, places], 2, 0).reshape(len(kept), past.shape[0], -1)
            past[:, distances, :, columns] = inputs


_SAVE_INTERVAL = 32
"""Committed tokens between two saves. A restarted worker prefills fewer in one call."""
log = logging.getLogger(__name__)


def layout_of(package: Package) -> ArenaLayout:
    """The layout of the package's caches: fp32, the required type of a call's input."""
    rows, key_heads, context, head = package.host_shape
    return ArenaLayout(rows // 2, key_heads, context, head, ElementType.FLOAT32)


class SequenceCache:
    """The cache of one sequence: an array in `Package.host_shape`, which is the body of `arena` if there is one."""

    def __init__(self, array: Single, arena: Arena | None, kv_rows: int) -> None:
        self.array = array
        self.kv = array[:kv_rows]
        """The keys and values: one view for the life of the cache, because calls get it."""
        self.arena = arena
        self.saved = 0
        """Committed tokens that the arena declares adoptable."""

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return 0 if self.arena is None else self.arena.layout.segment_bytes

    def save(self, committed: int) -> KvReference | None:
        """Declare the rows of the committed tokens adoptable and return their place, if enough of them are new."""
        if self.arena is None or committed - self.saved < _SAVE_INTERVAL:
            return None
        self.arena.commit(committed)
        self.saved = committed
        return KvReference(self.arena.name, committed)

    def truncate(self, committed: int) -> None:
        """Declare that only the rows of the first `committed` tokens stay unchanged."""
        if self.arena is not None and committed < self.arena.committed:
            self.arena.commit(committed)
        self.saved = min(self.saved, committed)


class CachePool:
    """Creates arenas through `exchange`. Without an exchange, caches are private memory of this process."""

    def __init__(self, package: Package, exchange: KvExchange | None) -> None:
        self._package = package
        self._shape = package.host_shape
        self._kv_rows = package.cache_shape[0]
        self._layout = layout_of(package)
        self._exchange = exchange
        self._free: list[SequenceCache] = []

    def acquire(self) -> SequenceCache:
        """A cache with undefined rows."""
        if self._free:
            return self._free.pop()
        if self._exchange is not None:
            try:
                arena = self._exchange.create(self._layout.capacity)
                return SequenceCache(arena.body, arena, self._kv_rows)
            except SegmentError as error:
                log.warning("the KV of a sequence will not survive a restart: %s", error)
        return SequenceCache(np.zeros(self._shape, np.float32), None, self._kv_rows)

    def adopt(self, reference: KvReference) -> SequenceCache:
        """The cache of an earlier life of the worker. Raises ArenaError or SegmentError."""
        if self._exchange is None:
            raise ArenaError("This draft shares no KV: prefill again.")
        arena = self._exchange.adopt(reference)
        if arena.layout != self._layout:
            arena.close()
            raise ArenaMismatch(f"KV arena {arena.name} has {arena.layout.capacity:,} slots: prefill again.")
        cache = SequenceCache(arena.body, arena, self._kv_rows)
        cache.saved = arena.committed
        return cache

    def memory(self, cache: SequenceCache) -> HostMemory:
        """The cache as the memory of a new sequence."""
        return HostMemory(self._package, cache.array, cache.kv)

    def release(self, cache: SequenceCache) -> None:
        cache.truncate(0)
        self._free.append(cache)


def exchange_of(package: Package, epoch: int, owner: int | None) -> KvExchange | None:
    """The exchange for this package's caches; None without an owner."""
    if owner is None:
        return None
    return KvExchange(layout_of(package), fingerprint=package.encode(), epoch=epoch, owner=owner)
