"""The keys and values of several sequences in one cache, so that one call evaluates rows of all. Knows no model.

A package has one input for its cache. Each row's mask hides the slots of the other sequences, and the host gives each
row its position, so the rows of a sequence may be in any slots. Every sequence keeps its own cache too, which other
calls, later requests and a restarted worker use: the joint cache has copies.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from draft_worker.coreml.arrays import Array, Single, Slots
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.memory import HostMemory
from draft_worker.coreml.runtime.tree_slots import HIDDEN, PackageRow

_IDLE_CALLS = 64
"""A sequence that took part in none of so many joint calls gives up its slots to those that need them."""


class JointPart(NamedTuple):
    """The rows of one sequence that a call evaluates."""

    memory: HostMemory
    numbers: Sequence[int]
    """Rows that have slots in the sequence's own cache."""


class JointMemory:
    """As many slots as a package has, for all sequences of its joint calls."""

    def __init__(self, package: Package) -> None:
        self._capacity = package.context
        self._kv: Single = np.zeros(package.cache_shape, np.float32)
        widest = package.widths[-1]
        self._mask: Single = np.empty((widest, self._capacity + widest), np.float32)
        """One sequence's, by the slots of its own cache."""
        self._free = np.ones(self._capacity, np.bool_)
        self._copies: dict[HostMemory, _Copy] = {}
        self._calls = 0

    def fits(self, parts: Sequence[tuple[HostMemory, int]]) -> bool:
        """Whether these sequences, each with so many new rows, have slots beside those of other recent calls."""
        inside = {memory for memory, _ in parts}
        others = [copy for memory, copy in self._copies.items() if memory not in inside and not self._idle(copy)]
        needed = sum(memory.slots.taken + rows for memory, rows in parts)
        return needed + sum(copy.size for copy in others) <= self._capacity

    def call(self, parts: Sequence[JointPart]) -> "JointCall":
        """The memory of a call that evaluates these rows, in this order, of different sequences that fit."""
        self._calls += 1
        copies = [self._copy(part.memory) for part in parts]
        used = [part.memory.slots.used for part in parts]
        for copy, slots in zip(copies, used, strict=True):
            copy.last_call = self._calls
            self._free[copy.drop_others(slots)] = True
        for part, copy, slots in zip(parts, copies, used, strict=True):
            missing = slots[copy.places[slots] < 0]
            copy.places[missing] = self._take(len(missing))
            copy.refresh(part, slots, self._kv)
        ends = accumulate(len(part.numbers) for part in parts)
        placed = [
            _Placed(part, copy, slots, slice(end - len(part.numbers), end))
            for part, copy, slots, end in zip(parts, copies, used, ends, strict=True)
        ]
        return JointCall(placed, self._kv, self._mask)

    def _copy(self, memory: HostMemory) -> "_Copy":
        if memory not in self._copies:
            self._copies[memory] = _Copy(self._capacity)
        return self._copies[memory]

    def _take(self, count: int) -> Slots:
        """So many free slots, if need be those of idle sequences."""
        for memory in [memory for memory, copy in self._copies.items() if self._idle(copy)]:
            if np.count_nonzero(self._free) >= count:
                break
            copy = self._copies.pop(memory)
            self._free[copy.places[copy.places >= 0]] = True
        taken = np.flatnonzero(self._free)[:count]
        assert len(taken) == count, "the caller asks first whether the sequences fit"
        self._free[taken] = False
        return taken

    def _idle(self, copy: "_Copy") -> bool:
        return self._calls - copy.last_call >= _IDLE_CALLS


class _Copy:
    """Where in the joint cache the rows of one sequence are."""

    def __init__(self, capacity: int) -> None:
        self.places: Slots = np.full(capacity, -1)
        """Joint slot of each slot of the sequence's own cache; -1: none."""
        self.last_call = 0
        self._stamps: Slots = np.full(capacity, -1)
        """`HostMemory.stamps` of what was copied."""

    @property
    def size(self) -> int:
        """Joint slots that it takes."""
        return int(np.count_nonzero(self.places >= 0))

    def drop_others(self, used: Slots) -> Slots:
        """Forget all slots of the own cache but those in use. Returns the joint slots that they had."""
        others = self.places >= 0
        others[used] = False
        dropped = self.places[others]
        self.places[others] = self._stamps[others] = -1
        return dropped

    def refresh(self, part: JointPart, used: Slots, kv: Single) -> None:
        """Copy the keys and values that changed, except of the rows that the call evaluates."""
        changed = self._stamps != part.memory.stamps
        changed[part.memory.slots.slots_of(part.numbers)] = False
        stale = used[changed[used]]
        if len(stale):
            kv[:, :, self.places[stale]] = part.memory.kv[:, :, stale]
            self._stamps[stale] = part.memory.stamps[stale]

    def store(self, part: JointPart, kv: Single, new: Single) -> None:
        """Store the keys and values of the part's rows, which its own cache has already."""
        slots = part.memory.slots.slots_of(part.numbers)
        kv[:, :, self.places[slots]] = new[: len(kv)]
        self._stamps[slots] = part.memory.stamps[slots]


class _Placed(NamedTuple):
    part: JointPart
    copy: _Copy
    used: Slots
    """Slots of the own cache that the sequence uses."""
    rows: slice
    """The part's place in the call."""


class JointCall:
    """A `CallMemory` for rows of several sequences: row i of the call is the i-th of all parts."""

    def __init__(self, parts: Sequence[_Placed], kv: Single, mask: Single) -> None:
        self._parts = parts
        self._kv = kv
        self._mask = mask
        self._rows = [(each.part.memory, number) for each in parts for number in each.part.numbers]
        self.numbers = range(len(self._rows))
        self.state = None

    @property
    def slots(self) -> "JointCall":
        return self

    def row(self, number: int) -> PackageRow:
        memory, own = self._rows[number]
        return memory.slots.row(own)

    def fill_mask(self, numbers: Sequence[int], mask: Single, window: int | None = None) -> None:
        """Like `TreeSlots.fill_mask`, for all rows of the call: a row sees its own sequence alone."""
        capacity = mask.shape[1] - len(mask)
        mask[:] = HIDDEN
        for part, copy, used, rows in self._parts:
            count = len(part.numbers)
            own = self._mask[:count, : capacity + count]
            part.memory.slots.fill_mask(part.numbers, own, window)
            mask[rows, copy.places[used]] = own[:, used]
            mask[rows, capacity + rows.start : capacity + rows.stop] = own[:, capacity:]
        # Padding sees what the last row sees.
        mask[len(numbers) :] = mask[len(numbers) - 1]

    def inputs(self, numbers: Sequence[int], width: int, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        if "past" in buffers:
            past, ancestors = buffers["past"], buffers["ancestors"]
            past[:], ancestors[:] = 0, 0
            for part, _, _, rows in self._parts:
                own = {"past": past[..., rows], "ancestors": ancestors[..., rows, rows]}
                part.memory.inputs(part.numbers, len(part.numbers), own)
        return {**buffers, "kv": self._kv}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        for part, copy, _, rows in self._parts:
            new = outputs["kv_new"][:, :, rows]
            part.memory.store(part.numbers, {"kv_new": new})
            copy.store(part, self._kv, new)
