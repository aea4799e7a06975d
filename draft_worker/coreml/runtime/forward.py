"""One call of a converted model: tokens of a tree in, logits out. Knows no sampling and no messages."""

from collections.abc import Sequence

import numpy as np

from draft_worker.candidates.shortlist import ROWS
from draft_worker.coreml.arrays import Single
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.call_inputs import CallInputs
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.runtime.memory import KvMemory


class PackageForward:
    """The functions of one package, with buffers that live as long as it: nothing here grows with the context."""

    def __init__(self, package: Package, tables: HostTables, runtime: Runtime) -> None:
        self._widest = package.widths[-1]
        self._runtime = runtime
        self._outputs = package.outputs
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        padded = -(-package.shape.vocabulary // ROWS) * ROWS
        self._logits: Single = np.full((self._widest, padded), -np.inf, np.float32)

    def width(self, count: int) -> int:
        """Of a call for so many tokens, or for the first of them: the smallest that fits."""
        return next((width for width in self._inputs if width >= count), self._widest)

    def most(self, room: int) -> int:
        """Tokens of the widest call that writes no more than `room` slots; of the narrowest, if none does."""
        return max((width for width in self._inputs if width <= room), default=min(self._inputs))

    def run(self, memory: KvMemory, numbers: Sequence[int]) -> Single:
        """Evaluate rows that have slots: (rows, vocabulary padded with -inf) logits, good until the next call."""
        inputs = self._inputs[self.width(len(numbers))]
        rows = [memory.slots.row(number) for number in numbers]
        data = inputs.place([row.token for row in rows], [row.position for row in rows])
        memory.slots.show(numbers, data["mask"][0, 0])
        outputs = self._runtime.predict(inputs.width, {**data, **memory.inputs(numbers, inputs.width)}, memory.state)
        memory.store(numbers, outputs)
        begin = 0
        for index, size in enumerate(self._outputs):
            self._logits[: len(numbers), begin : begin + size] = outputs[f"logits_{index}"][0, 0, : len(numbers)]
            begin += size
        return self._logits[: len(numbers)]
