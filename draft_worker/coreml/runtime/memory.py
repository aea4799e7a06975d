"""The KV of a sequence: on the host as an fp32 array, or in the runtime as a state.

Knows the package's cache and its slots; knows no logits and no tree.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from draft_worker.coreml.arrays import Array, Single, Slots
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.convolution import ConvolutionHistory
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

        No array is made for a call, because the runtime may read its inputs later (`lent_arrays`).
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
        already; a call's inputs are never freed (`lent_arrays`)."""
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
