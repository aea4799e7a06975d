"""Calls of a converted package: the interface of a runtime, the inputs that the host computes, logits out.

All sequences share the buffers of inputs, which are filled in place: a call is over before the next one begins, and
Core ML may read its inputs after a call has returned (`apple.lend`). They are fp32, because coremltools converts fp16
inputs to fp32. Knows no sampling, no messages and no runtime.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from draft_worker.candidates.host_ranking import GROUP_SIZE
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Array, Package, Single, rotation_inputs
from draft_worker.coreml.runtime.joint_memory import JointMemory, part_rows
from draft_worker.coreml.runtime.memory import CallPart, HostMemory
from protocol.inference.slots import PREFIX


class Runtime(Protocol):
    """A loaded converted model, ready for calls of each function."""

    name: str
    device: str
    """A description of the device for the user."""

    def load(self, function: str) -> None:
        """Load the function, unless it is loaded. May take minutes, when the device compiles it."""
        ...

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Call the function. The runtime may read `inputs` until it ends: the caller reuses its arrays."""
        ...


class CallInputs:
    """The inputs of the function for one width, without `kv`."""

    def __init__(self, package: Package, tables: HostTables, width: int) -> None:
        shape = package.shape
        self.width = width
        self.function = package.function(width)
        self._tables = tables
        self._scale = np.float32(shape.embedding_scale)
        shapes = package.input_shapes(width)
        self.buffers: dict[str, Array] = {name: np.zeros(size, np.float32) for name, size in shapes.items()}

    def place(self, tokens: Sequence[int], positions: Sequence[int]) -> dict[str, Array]:
        """The buffers for up to `width` tokens; the outputs behind them are undefined.

        The caller fills the masks, and what depends on the cache. Positions are below the context.
        """
        self._embed(tokens)
        self._rotate(list(positions))
        if self._tables.position_scale is not None:
            self.buffers["position_scale"][0, 0, 0, : len(positions)] = self._tables.position_scale[list(positions)]
        return self.buffers

    def _embed(self, tokens: Sequence[int]) -> None:
        rows = self.buffers["x"][0, :, 0]
        rows[:, : len(tokens)] = self._tables.embedding[list(tokens)].T
        if self._scale != 1:
            rows[:, : len(tokens)] *= self._scale
        # Padding repeats a token: with zeros, a device that flushes the norm's epsilon would give NaN.
        rows[:, len(tokens) :] = rows[:, len(tokens) - 1 : len(tokens)]

    def _rotate(self, positions: list[int]) -> None:
        for number, rotation in enumerate(self._tables.rotations):
            for name, table in zip(rotation_inputs(number), rotation, strict=True):
                rows, half = self.buffers[name][0, 0], table.shape[1]
                rows[:half, : len(positions)] = table[positions].T
                rows[half:, : len(positions)] = rows[:half, : len(positions)]


class PackageForward:
    """The functions of one package, and forwards over the rows of sequences, one call each.

    A forward of a lone sequence allocates nothing that grows with the context. Logits are valid until the next ones.
    """

    def __init__(self, package: Package, tables: HostTables, runtime: Runtime) -> None:
        self.widest = package.widths[-1]
        """Most tokens of one call."""
        self._masks = package.masks
        self._predict = runtime.predict
        self._outputs = package.outputs
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        padded = -(-package.head_rows // GROUP_SIZE) * GROUP_SIZE
        self._logits: Single = np.full((self.widest, padded), -np.inf, np.float32)
        self._joint = JointMemory(package)

    def joins(self, parts: Sequence[tuple[HostMemory, int]]) -> bool:
        """Whether one call can evaluate so many more rows of each of these sequences."""
        fits = sum(rows for _, rows in parts) <= self.widest
        return fits and self._joint.fits([(memory, memory.slots.taken + rows) for memory, rows in parts])

    def run(self, parts: Sequence[CallPart]) -> dict[str, Array]:
        """The outputs of a call of these parts, of different sequences that join. Stores their keys and values."""
        tokens = [token for part in parts for token in part.tokens]
        # The function of the smallest width.
        inputs = next(each for width, each in self._inputs.items() if width >= len(tokens))
        data = inputs.place(tokens, [position for part in parts for position in part.positions])
        if len(parts) == 1:
            self._joint.count_step()
            kv, fill_mask = parts[0].memory.kv, parts[0].fill_mask
        else:
            call = self._joint.call(parts)
            kv, fill_mask = call.kv, call.fill_mask
        for name, window in self._masks.items():
            fill_mask(data[name][0, 0], window)
        placed = list(zip(parts, part_rows(parts), strict=True))
        if "past" in data:
            past, ancestors = data["past"], data["ancestors"]
            past[:], ancestors[:] = 0, 0
            for part, rows in placed:
                part.memory.fill_convolutions(part.numbers, past[..., rows], ancestors[..., rows, rows])
        outputs = self._predict(inputs.function, {**data, "kv": kv})
        for part, rows in placed:
            part.memory.write(part.slots, outputs["kv_new"][:, :, rows])
        return outputs

    def placed(self, memory: HostMemory, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[CallPart]:
        """Add rows, as many at a time as one call takes; the parts with those that have slots. Each is run at once."""
        for begin in range(0, len(tokens), self.widest):
            numbers = memory.slots.add(tokens[begin : begin + self.widest], parents[begin : begin + self.widest])
            written = [number for number in numbers if memory.slots.row(number).slot is not None]
            if written:
                yield memory.rows(written)

    def prefill(self, memory: HostMemory, tokens: Sequence[int]) -> None:
        """Commit these tokens."""
        path = range(memory.next_row, memory.next_row + len(tokens))
        for part in self.placed(memory, tokens, chain(path)):
            self.run([part])
        self.keep(memory, path, ())

    def keep(self, memory: HostMemory, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path`, keep those in `surviving`, drop the rest."""
        if unwritten := memory.commit(path, surviving):
            self.prefill(memory, unwritten)

    def evaluate(self, parts: Sequence[CallPart]) -> Single:
        """Run these parts: (rows, the head's rows padded with -inf to whole groups) logits."""
        outputs, count, begin = self.run(parts), sum(len(part.numbers) for part in parts), 0
        for index, size in enumerate(self._outputs):
            self._logits[:count, begin : begin + size] = outputs[f"logits_{index}"][0, 0, :count]
            begin += size
        return self._logits[:count]


def chain(numbers: range) -> list[int]:
    """Parents of consecutive rows; the first row follows the committed prefix."""
    return [PREFIX, *numbers[:-1]] if numbers else []
