"""The keys and values of several sequences in one cache, so that one call evaluates rows of all. Knows no model.

A package has one input for its cache. Each row's mask hides the slots of the other sequences, and the host gives each
row its position, so the rows of a sequence may be in any slots. Every sequence keeps its own cache too, which other
calls, later requests and a restarted worker use: the joint cache has copies.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from draft_worker.coreml.arrays import Array, Single, Slots
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.memory import HostMemory
from draft_worker.coreml.runtime.tree_slots import HIDDEN, PackageRow

_IDLE_STEPS = 64
"""A sequence that took part in no joint call for so many steps gives up its slots to those that need them."""


class OwnCache(Protocol):
    """The cache of one sequence."""

    @property
    def kv(self) -> Single: ...

    @property
    def stamps(self) -> Slots:
        """By slot: another number after each change of its contents."""
        ...


class JointPart(NamedTuple):
    """The rows of one sequence that a call evaluates. Slots are those of its own cache."""

    cache: OwnCache
    used: Slots
    """Slots of committed tokens and of rows, those of the call included."""
    rows: Sequence[int]
    """Slots of the call's rows."""
    fill_mask: Callable[[Single, int | None], None]
    """Fills (rows, slots + rows) for these rows and a window, as `TreeSlots.fill_mask`."""


class JointMemory:
    """As many slots as a package has, for all sequences of its joint calls."""

    def __init__(self, package: Package) -> None:
        self._capacity = package.context
        self._kv: Single = np.zeros(package.cache_shape, np.float32)
        widest = package.widths[-1]
        self._mask: Single = np.empty((widest, self._capacity + widest), np.float32)
        """One sequence's, by the slots of its own cache."""
        self._free = np.ones(self._capacity, np.bool_)
        self._copies: dict[OwnCache, _Copy] = {}
        self._steps = 0

    def fits(self, needed: Sequence[tuple[OwnCache, int]]) -> bool:
        """Whether each of these sequences can have so many slots, beside the other sequences of recent steps."""
        inside = {cache for cache, _ in needed}
        others = [copy for cache, copy in self._copies.items() if cache not in inside and not self._idle(copy)]
        return sum(slots for _, slots in needed) + sum(copy.size for copy in others) <= self._capacity

    def count_step(self) -> None:
        """A step without a joint call. Sequences that have ended, and leave no room for one, become idle by it too."""
        self._steps += 1

    def call(self, parts: Sequence[JointPart]) -> "JointCall":
        """A call that evaluates these rows, in this order, of different sequences that fit."""
        self._steps += 1
        copies = [self._copy(part.cache) for part in parts]
        for part, copy in zip(parts, copies, strict=True):
            copy.last_step = self._steps
            self._free[copy.drop_others(part.used)] = True
        for part, copy in zip(parts, copies, strict=True):
            missing = part.used[copy.places[part.used] < 0]
            copy.places[missing] = self._take(len(missing))
            copy.refresh(part, self._kv)
        return JointCall(parts, [copy.places for copy in copies], self._kv, self._mask)

    def _copy(self, cache: OwnCache) -> "_Copy":
        if cache not in self._copies:
            self._copies[cache] = _Copy(self._capacity)
        return self._copies[cache]

    def _take(self, count: int) -> Slots:
        """So many free slots, if need be those of idle sequences."""
        for cache in [cache for cache, copy in self._copies.items() if self._idle(copy)]:
            if np.count_nonzero(self._free) >= count:
                break
            copy = self._copies.pop(cache)
            self._free[copy.places[copy.places >= 0]] = True
        taken = np.flatnonzero(self._free)[:count]
        assert len(taken) == count, "the caller asks first whether the sequences fit"
        self._free[taken] = False
        return taken

    def _idle(self, copy: "_Copy") -> bool:
        return self._steps - copy.last_step >= _IDLE_STEPS


class _Copy:
    """Where in the joint cache the rows of one sequence are."""

    def __init__(self, capacity: int) -> None:
        self.places: Slots = np.full(capacity, -1)
        """Joint slot of each slot of the sequence's own cache; -1: none."""
        self.last_step = 0
        self._stamps: Slots = np.full(capacity, -1)
        """`OwnCache.stamps` of what was copied."""

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

    def refresh(self, part: JointPart, kv: Single) -> None:
        """Copy the keys and values that changed, except of the rows that the call evaluates."""
        changed = self._stamps != part.cache.stamps
        changed[list(part.rows)] = False
        stale = part.used[changed[part.used]]
        if len(stale):
            # A NaN would spoil the rows of the other sequences, which may not see it.
            kv[:, :, self.places[stale]] = np.nan_to_num(part.cache.kv[:, :, stale], nan=0.0, posinf=0.0, neginf=0.0)
            self._stamps[stale] = part.cache.stamps[stale]


class JointCall:
    """What a call reads for the rows of several sequences. The caller stores the new keys and values in each
    sequence's own cache, from where the next joint call copies them."""

    def __init__(self, parts: Sequence[JointPart], places: Sequence[Slots], kv: Single, mask: Single) -> None:
        """`places`: joint slots by the slots of each sequence's own cache. `mask`: room for that of one sequence."""
        self.kv = kv
        """The input of the call."""
        ends = list(accumulate(len(part.rows) for part in parts))
        self.rows = [slice(end - len(part.rows), end) for part, end in zip(parts, ends, strict=True)]
        """Each part's place in the call."""
        self._parts = parts
        self._places = places
        self._mask = mask

    def fill_mask(self, mask: Single, window: int | None = None) -> None:
        """Fill (width, slots + width) `mask`: every row sees its own sequence alone."""
        capacity = mask.shape[1] - len(mask)
        mask[:] = HIDDEN
        for part, places, rows in zip(self._parts, self._places, self.rows, strict=True):
            own = self._mask[: len(part.rows), : capacity + len(part.rows)]
            part.fill_mask(own, window)
            mask[rows, places[part.used]] = own[:, part.used]
            mask[rows, capacity + rows.start : capacity + rows.stop] = own[:, capacity:]
        # Padding sees what the last row sees.
        last = self.rows[-1].stop
        mask[last:] = mask[last - 1]


class SequenceRows(NamedTuple):
    """Rows of one sequence that have slots."""

    memory: HostMemory
    numbers: Sequence[int]

    @property
    def joint(self) -> JointPart:
        slots = self.memory.slots
        return JointPart(self.memory, slots.used, slots.slots_of(self.numbers), partial(slots.fill_mask, self.numbers))


class SharedCall:
    """One call for rows of several sequences, a `CallMemory`: row i of the call is the i-th of all parts."""

    def __init__(self, joint: JointMemory, parts: Sequence[SequenceRows]) -> None:
        """The sequences fit `joint`."""
        self._call = joint.call([part.joint for part in parts])
        self._parts = list(zip(parts, self._call.rows, strict=True))
        self._rows = [(part.memory, number) for part in parts for number in part.numbers]
        self.numbers = range(len(self._rows))

    @property
    def slots(self) -> "SharedCall":
        return self

    def row(self, number: int) -> PackageRow:
        memory, own = self._rows[number]
        return memory.slots.row(own)

    def fill_mask(self, numbers: Sequence[int], mask: Single, window: int | None = None) -> None:
        self._call.fill_mask(mask, window)

    def inputs(self, numbers: Sequence[int], buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        if "past" in buffers:
            past, ancestors = buffers["past"], buffers["ancestors"]
            past[:], ancestors[:] = 0, 0
            for part, rows in self._parts:
                own = {"past": past[..., rows], "ancestors": ancestors[..., rows, rows]}
                part.memory.inputs(part.numbers, own)
        return {**buffers, "kv": self._call.kv}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        for part, rows in self._parts:
            part.memory.store(part.numbers, {"kv_new": outputs["kv_new"][:, :, rows]})
