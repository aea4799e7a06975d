"""Who holds the keys and values of a sequence: the host, in an array of fp32, or the runtime, as its state.

Knows the package's cache and its slots; knows no logits and no tree.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.interface import DeviceState, Runtime
from draft_worker.coreml.runtime.tree_slots import FixedSlots, TreeSlots

_STATE_BYTES = 2
"""Of a number in a state: fp16."""


class KvMemory(Protocol):
    """Slots and what lies in them."""

    slots: TreeSlots
    state: DeviceState | None

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        ...

    @property
    def room(self) -> int:
        """Most tokens that a call may write now, its unused places included."""
        ...

    def make_room(self, width: int) -> None:
        """Before rows are added that a call of this width will write."""
        ...

    def inputs(self, numbers: Sequence[int], width: int) -> Mapping[str, Array]:
        """What a call that evaluates these rows needs beyond tokens, positions and mask."""
        ...

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """Take what the call computed for these rows, in their order."""
        ...

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The contents of two slots change places, pair after pair."""
        ...


class HostMemory:
    """An array in the package's own layout, which is the input itself, call after call.

    It is fp32, and the caller lets it live as long as the runtime: coremltools would copy fp16 inputs to new
    fp32 ones at every call, as many bytes as the context is long, and Core ML may let go of an input on a
    thread of its own, where it must not be the last one to do so.
    """

    def __init__(self, cache: Single) -> None:
        self.slots: TreeSlots = TreeSlots(cache.shape[2])
        self.state: DeviceState | None = None
        self._cache = cache

    @property
    def size(self) -> int:
        return self._cache.nbytes

    @property
    def room(self) -> int:
        return self.slots.capacity

    def make_room(self, width: int) -> None:
        """Slots are used again one by one."""

    def inputs(self, numbers: Sequence[int], width: int) -> Mapping[str, Array]:
        return {"kv": self._cache}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        self._cache[:, :, self.slots.places(numbers)] = outputs["kv_new"][:, :, : len(numbers)]

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        for one, other in pairs:
            self._cache[:, :, [one, other]] = self._cache[:, :, [other, one]]


class DeviceMemory:
    """The runtime's state, which only its calls write: `width` slots in a row."""

    def __init__(self, package: Package, runtime: Runtime) -> None:
        self._fixed = FixedSlots(package.context)
        self._held = runtime.make_state()
        self.slots: TreeSlots = self._fixed
        self.state: DeviceState | None = self._held
        shape = package.shape
        self._begin = np.zeros(4, np.int32)
        self._end = np.array([2 * shape.layers, shape.key_heads, 0, shape.head], np.int32)
        self.size = math.prod(package.cache_shape) * _STATE_BYTES

    @property
    def room(self) -> int:
        return self._fixed.room

    def make_room(self, width: int) -> None:
        """Rare, and slow: the whole state leaves the device and comes back without gaps."""
        if self._fixed.cramped(width):
            sources = self._fixed.compact()
            cache = self._held.read()
            cache[:, :, : len(sources)] = cache[:, :, sources]
            self._held.write(cache)

    def inputs(self, numbers: Sequence[int], width: int) -> Mapping[str, Array]:
        first = self._fixed.places(numbers)[0]
        self._begin[2], self._end[2] = first, first + width
        return {"begin": self._begin, "end": self._end}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """The call has done it."""

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert not pairs
