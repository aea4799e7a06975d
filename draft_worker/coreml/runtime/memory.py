"""The KV of a sequence: on the host as an fp32 array, or in the runtime as a state.

Knows the package's cache and its slots; knows no logits and no tree.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from draft_worker.coreml.arrays import Array, Single, Slots
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.interface import DeviceState, Runtime
from draft_worker.coreml.runtime.tree_slots import FixedSlots, PackageRow, TreeSlots

_STATE_BYTES = 2
"""Bytes of a number in a state: fp16."""


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

    @property
    def state(self) -> DeviceState | None: ...

    def inputs(self, numbers: Sequence[int], width: int, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        """All inputs of a call that evaluates these rows: the `buffers` of its function, completed, and the cache.

        No array is made for a call, because the runtime may read its inputs later (`apple.lend`).
        """
        ...

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """Store the keys and values of these rows, in this order, from the outputs of their call."""
        ...


class KvMemory(CallMemory, Protocol):
    """The slots of a sequence and their keys and values."""

    @property
    def slots(self) -> TreeSlots: ...

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        ...

    @property
    def room(self) -> int:
        """Most slots that a call can write now. A call writes as many as its width."""
        ...

    def make_room(self, width: int) -> None:
        """Prepare for new rows that a call of this width will write."""
        ...

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange the contents of two slots, pair after pair."""
        ...


class HostMemory:
    """An array in the package's layout, whose keys and values are an input of every call.

    It is fp32, because coremltools would copy an fp16 input to fp32 at every call.
    """

    def __init__(self, package: Package, cache: Single, kv: Single | None = None) -> None:
        """`cache`: in `Package.host_shape`. `kv`: the view of its keys and values that calls get, if there is one
        already; a call's inputs are never freed (`apple.lend`)."""
        self.slots: TreeSlots = TreeSlots(package.context)
        self.state: DeviceState | None = None
        self.kv = cache[: package.cache_shape[0]] if kv is None else kv
        self.stamps: Slots = np.zeros(package.context, np.intp)
        """By slot: another number after each change of its contents."""
        self._changes = 0
        self._cache = cache
        self._convolutions = ConvolutionHistory(package, cache) if package.shape.convolutions else None

    @property
    def size(self) -> int:
        return self._cache.nbytes

    @property
    def room(self) -> int:
        return self.slots.capacity

    def make_room(self, width: int) -> None:
        """Slots are reused one by one."""

    def inputs(self, numbers: Sequence[int], width: int, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        if self._convolutions is not None:
            self._convolutions.fill(self.slots, numbers, buffers)
        return {**buffers, "kv": self.kv}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        new, slots = outputs["kv_new"], self.slots.slots_of(numbers)
        self._cache[: len(new), :, slots] = new[:, :, : len(numbers)]
        self._changed(slots)

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        for one, other in pairs:
            self._cache[:, :, [one, other]] = self._cache[:, :, [other, one]]
            self._changed([one, other])

    def _changed(self, slots: Sequence[int]) -> None:
        self._changes += 1
        self.stamps[slots] = self._changes


class DeviceMemory:
    """The runtime's state. Only calls write it, `width` consecutive slots each."""

    def __init__(self, package: Package, runtime: Runtime) -> None:
        self._fixed = FixedSlots(package.context)
        self._state = runtime.make_state()
        self.slots: TreeSlots = self._fixed
        self.state: DeviceState | None = self._state
        self.size = math.prod(package.cache_shape) * _STATE_BYTES

    @property
    def room(self) -> int:
        return self._fixed.room

    def make_room(self, width: int) -> None:
        """Compact the state if necessary. This is rare and slow: the whole state is read and written."""
        if self._fixed.needs_compaction(width):
            sources = self._fixed.compact()
            cache = self._state.read()
            cache[:, :, : len(sources)] = cache[:, :, sources]
            self._state.write(cache)

    def inputs(self, numbers: Sequence[int], width: int, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        first = self._fixed.slots_of(numbers)[0]
        buffers["begin"][2], buffers["end"][2] = first, first + width
        return buffers

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """The call has already written the state."""

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert not pairs


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
