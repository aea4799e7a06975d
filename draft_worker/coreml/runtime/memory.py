"""The KV of a sequence: an fp32 array on the host, and what a call evaluates of it.

Knows the package's cache and its slots; knows no logits and no tree.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from draft_worker.coreml.package import Package, Single, Slots
from draft_worker.coreml.runtime.tree_slots import TreeSlots


class HostMemory:
    """The slots of a sequence, and an array in the package's layout, whose keys and values every call reads.

    It is fp32, because coremltools would copy an fp16 input to fp32 at every call.
    """

    def __init__(self, pool: "CachePool") -> None:
        """An empty sequence's."""
        self._pool = pool
        self.stamps: Slots = np.zeros(pool.package.context, np.intp)
        """By slot: another number after each change of its contents."""
        self._changes = 0
        self._cache = pool.acquire()
        self.slots = TreeSlots(pool.package.context)

    @property
    def kv(self) -> Single:
        """The keys and values, the input of a call."""
        return self._cache.kv

    @property
    def memory(self) -> int:
        """Bytes of keys and values."""
        return self._cache.array.nbytes

    @property
    def next_row(self) -> int:
        return self.slots.next_row

    def position(self, row: int) -> int:
        return self.slots.row(row).position

    def rows(self, numbers: Sequence[int]) -> "CallPart":
        """A call's part that evaluates these rows, which have slots."""
        return CallPart(self, numbers)

    def write(self, slots: Sequence[int], new: Single) -> None:
        """Store keys and values, (rows, key heads, slots, head), in these slots.

        What overflowed fp16 is stored as 0: 0 times infinity is no number, so that the row would also blind every token
        that the mask hides it from, and later requests in these slots.
        """
        self._cache.array[: len(new), :, slots] = np.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)
        self._changed(slots)

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the contents of two slots, pair after pair."""
        array = self._cache.array
        for one, other in pairs:
            array[:, :, [one, other]] = array[:, :, [other, one]]
            self._changed([one, other])

    def commit(self, path: Sequence[int], surviving: Iterable[int]) -> list[int]:
        """Commit the rows of `path`, keep those in `surviving`, drop the rest. Returns `Kept.unwritten`."""
        kept = self.slots.keep(path, surviving)
        self.exchange(kept.exchanged)
        return kept.unwritten

    def truncate(self, length: int) -> None:
        """Drop the committed tokens behind `length`, and all rows."""
        self.slots.truncate(length)

    def begin_with(self, other: "HostMemory", length: int) -> None:
        """Let this empty sequence have the first `length` committed tokens of another one: they lie in the first slots,
        in order."""
        self._cache.array[:, :, :length] = other._cache.array[:, :, :length]
        self.slots.adopt(length)
        self._changed(range(length))

    def fill_convolutions(self, numbers: Sequence[int], past: Single, ancestors: Single) -> None:
        """Fill these inputs, which are 0, of a call that evaluates these rows, in this order: what short convolutions
        need of a token's ancestors.

        An ancestor's input comes from its slot, or from the call itself, if the ancestor is one of its rows.
        """
        column = {number: index for index, number in enumerate(numbers)}
        most = self._pool.package.shape.taps - 1
        kept: list[tuple[int, int, int]] = []
        for index, number in enumerate(numbers):
            for distance, (row, slot) in enumerate(islice(self.slots.before(number), most)):
                if row in column:
                    ancestors[0, distance, column[row], index] = 1
                else:
                    kept.append((distance, index, slot))
        if kept:
            distances, columns, places = (list(each) for each in zip(*kept, strict=True))
            # (ancestors, convolutions, hidden): numpy puts the axis of two separated index lists first.
            inputs = np.moveaxis(self._cache.convolutions[:, :, places], 2, 0).reshape(len(kept), past.shape[0], -1)
            past[:, distances, :, columns] = inputs

    def close(self) -> None:
        self._pool.release(self._cache)

    def _changed(self, slots: Sequence[int]) -> None:
        self._changes += 1
        self.stamps[slots] = self._changes


class CallPart(NamedTuple):
    """What a call evaluates of one sequence: rows of the tree, which have slots."""

    memory: HostMemory
    numbers: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        return [self.memory.slots.row(number).token for number in self.numbers]

    @property
    def positions(self) -> list[int]:
        return [self.memory.position(number) for number in self.numbers]

    @property
    def slots(self) -> list[int]:
        return self.memory.slots.slots_of(self.numbers)

    def fill_mask(self, mask: Single, window: int | None = None) -> None:
        """As `TreeSlots.fill_mask`."""
        self.memory.slots.fill_mask(self.numbers, mask, window)


class SequenceCache:
    """The cache of one sequence: an array in `Package.host_shape`."""

    def __init__(self, package: Package) -> None:
        self.array: Single = np.zeros(package.host_shape, np.float32)
        self.kv = self.array[: package.cache_shape[0]]
        """The keys and values: one view for the life of the cache."""
        shape, begin = package.shape, package.cache_shape[0]
        rows = self.array[begin : begin + shape.sharing * shape.convolutions]
        self.convolutions = rows.reshape(shape.convolutions, shape.heads, *rows.shape[2:])
        """The inputs of short convolutions, kept by slot like keys and values."""


class CachePool:
    """Caches of a package, which are used again: arrays that Core ML was given are never freed (`apple.lend`)."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self._free: list[SequenceCache] = []

    def acquire(self) -> SequenceCache:
        """A cache with undefined rows."""
        return self._free.pop() if self._free else SequenceCache(self.package)

    def release(self, cache: SequenceCache) -> None:
        self._free.append(cache)
