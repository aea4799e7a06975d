"""The keys and values of several sequences in one cache, so that one call evaluates rows of all. Knows no model.

A package has one input for its cache. Each row's mask hides the slots of the other sequences, and the host gives each
row its position, so the rows of a sequence may be in any slots. Every sequence keeps its own cache too, which other
calls, later requests and a restarted worker use: the joint cache has copies.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from draft_worker.coreml.package import Package, Single, Slots
from draft_worker.coreml.runtime.memory import CallPart, HostMemory
from draft_worker.coreml.runtime.tree_slots import HIDDEN

_IDLE_STEPS = 64
"""A sequence that took part in no joint call for so many calls gives up its slots to those that need them."""


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
        self._steps = 0

    def fits(self, needed: Sequence[tuple[HostMemory, int]]) -> bool:
        """Whether each of these sequences can have so many slots, beside the other sequences of recent steps."""
        inside = {memory for memory, _ in needed}
        others = [copy for memory, copy in self._copies.items() if memory not in inside and not self._idle(copy)]
        return sum(slots for _, slots in needed) + sum(copy.size for copy in others) <= self._capacity

    def count_step(self) -> None:
        """A call of one sequence: those that have ended, and leave no room for a joint one, become idle by it too."""
        self._steps += 1

    def call(self, parts: Sequence[CallPart]) -> "JointCall":
        """A call that evaluates these rows, in this order, of different sequences that fit."""
        self._steps += 1
        copies = [self._copies.setdefault(part.memory, _Copy(self._capacity)) for part in parts]
        for part, copy in zip(parts, copies, strict=True):
            copy.last_step = self._steps
            self._free[copy.drop_others(part.memory.slots.used)] = True
        for part, copy in zip(parts, copies, strict=True):
            used = part.memory.slots.used
            missing = used[copy.places[used] < 0]
            copy.places[missing] = self._take(len(missing))
            copy.refresh(part, self._kv)
        return JointCall(parts, [copy.places for copy in copies], self._kv, self._mask)

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
        return self._steps - copy.last_step >= _IDLE_STEPS


class _Copy:
    """Where in the joint cache the rows of one sequence are."""

    def __init__(self, capacity: int) -> None:
        self.places: Slots = np.full(capacity, -1)
        """Joint slot of each slot of the sequence's own cache; -1: none."""
        self.last_step = 0
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

    def refresh(self, part: CallPart, kv: Single) -> None:
        """Copy the keys and values that changed, except of the rows that the call evaluates."""
        memory, used = part.memory, part.memory.slots.used
        changed = self._stamps != memory.stamps
        changed[part.slots] = False
        stale = used[changed[used]]
        if len(stale):
            # A NaN would spoil the rows of the other sequences, which may not see it.
            kv[:, :, self.places[stale]] = np.nan_to_num(memory.kv[:, :, stale], nan=0.0, posinf=0.0, neginf=0.0)
            self._stamps[stale] = memory.stamps[stale]


class JointCall:
    """What a call reads for the rows of several sequences. The caller stores the new keys and values in each
    sequence's own cache, from where the next joint call copies them."""

    def __init__(self, parts: Sequence[CallPart], places: Sequence[Slots], kv: Single, mask: Single) -> None:
        """`places`: joint slots by the slots of each sequence's own cache. `mask`: room for that of one sequence."""
        self.kv = kv
        """The input of the call."""
        self._parts = list(zip(parts, places, part_rows(parts), strict=True))
        self._mask = mask

    def fill_mask(self, mask: Single, window: int | None = None) -> None:
        """Fill (width, slots + width) `mask`: every row sees its own sequence alone."""
        capacity, last = mask.shape[1] - len(mask), 0
        mask[:] = HIDDEN
        for part, places, rows in self._parts:
            last, used = rows.stop, part.memory.slots.used
            own = self._mask[: len(part.numbers), : capacity + len(part.numbers)]
            part.fill_mask(own, window)
            mask[rows, places[used]] = own[:, used]
            mask[rows, capacity + rows.start : capacity + rows.stop] = own[:, capacity:]
        # Padding sees what the last row sees.
        mask[last:] = mask[last - 1]


def part_rows(parts: Sequence[CallPart]) -> list[slice]:
    """Each part's rows in the call."""
    ends = list(accumulate(len(part.numbers) for part in parts))
    return [slice(end - len(part.numbers), end) for part, end in zip(parts, ends, strict=True)]
