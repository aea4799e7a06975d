"""One call for rows of several sequences of a draft that reads tokens alone. Knows no sampling and no messages."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.runtime.joint_memory import JointMemory, JointPart
from draft_worker.coreml.runtime.memory import HostMemory
from draft_worker.coreml.runtime.tree_slots import PackageRow


class SequenceRows(NamedTuple):
    """Rows of one sequence that have slots."""

    memory: HostMemory
    numbers: Sequence[int]

    @property
    def joint(self) -> JointPart:
        slots = self.memory.slots
        return JointPart(self.memory, slots.used, slots.slots_of(self.numbers), partial(slots.fill_mask, self.numbers))


class SharedCall:
    """A `CallMemory`: row i of the call is the i-th of all parts."""

    def __init__(self, joint: JointMemory, parts: Sequence[SequenceRows]) -> None:
        """The sequences fit `joint`."""
        self._call = joint.call([part.joint for part in parts])
        self._parts = list(zip(parts, self._call.rows, strict=True))
        self._rows = [(part.memory, number) for part in parts for number in part.numbers]
        self.numbers = range(len(self._rows))
        self.state = None

    @property
    def slots(self) -> "SharedCall":
        return self

    def row(self, number: int) -> PackageRow:
        memory, own = self._rows[number]
        return memory.slots.row(own)

    def fill_mask(self, numbers: Sequence[int], mask: Single, window: int | None = None) -> None:
        self._call.fill_mask(mask, window)

    def inputs(self, numbers: Sequence[int], width: int, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        if "past" in buffers:
            past, ancestors = buffers["past"], buffers["ancestors"]
            past[:], ancestors[:] = 0, 0
            for part, rows in self._parts:
                own = {"past": past[..., rows], "ancestors": ancestors[..., rows, rows]}
                part.memory.inputs(part.numbers, len(part.numbers), own)
        return {**buffers, "kv": self._call.kv}

    def store(self, numbers: Sequence[int], outputs: Mapping[str, Array]) -> None:
        for part, rows in self._parts:
            part.memory.store(part.numbers, {"kv_new": outputs["kv_new"][:, :, rows]})
