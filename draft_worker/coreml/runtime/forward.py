"""One call of a converted model: tokens of a tree in, logits out. Knows no sampling and no messages."""

from collections.abc import Sequence

import numpy as np

from draft_worker.candidates.shortlist import GROUP_SIZE
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.call_inputs import CallInputs
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.runtime.memory import CallMemory


class PackageForward:
    """The functions of one package and their buffers.

    A call of one sequence allocates nothing that grows with the context.
    """

    def __init__(self, package: Package, tables: HostTables, runtime: Runtime) -> None:
        self.widest = package.widths[-1]
        """Most tokens of one call."""
        self._runtime = runtime
        self._outputs = package.outputs
        self._masks = package.masks
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        padded = -(-package.head_rows // GROUP_SIZE) * GROUP_SIZE
        self._logits: Single = np.full((self.widest, padded), -np.inf, np.float32)

    def width(self, count: int) -> int:
        """The smallest width for a call of `count` tokens; the largest width if none suffices."""
        return next((width for width in self._inputs if width >= count), self.widest)

    def run(self, memory: CallMemory, numbers: Sequence[int]) -> Single:
        """Evaluate rows that have slots: (rows, the head's rows padded with -inf) logits, valid until the next call."""
        inputs = self._inputs[self.width(len(numbers))]
        rows = [memory.slots.row(number) for number in numbers]
        data = inputs.place([row.token for row in rows], [row.position for row in rows])
        for name, window in self._masks.items():
            memory.slots.fill_mask(numbers, data[name][0, 0], window)
        outputs = self._runtime.predict(inputs.function, memory.inputs(numbers, data))
        memory.store(numbers, outputs)
        begin = 0
        for index, size in enumerate(self._outputs):
            self._logits[: len(numbers), begin : begin + size] = outputs[f"logits_{index}"][0, 0, : len(numbers)]
            begin += size
        return self._logits[: len(numbers)]
