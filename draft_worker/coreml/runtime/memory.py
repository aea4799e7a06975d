"""The KV of a sequence: an fp32 array on the host.

Knows the package's cache and its slots; knows no logits and no tree.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from draft_worker.coreml.arrays import Array, Single, Slots
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.tree_slots import PackageRow, TreeSlots


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
        """Store keys and values, (rows, key heads, slots, head), in these slots."""
        self._cache[: len(new), :, slots] = new
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
