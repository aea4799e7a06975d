"""Calls of a converted package: the interface of a runtime, the inputs that the host computes, logits out, features in.

All sequences share the buffers of inputs, which are filled in place: a call is over before the next one begins, and
Core ML may read its inputs after a call has returned (`apple.lend`). They are fp32, because coremltools converts fp16
inputs to fp32. Knows no sampling, no messages and no runtime.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from draft_worker.candidates.host_ranking import GROUP_SIZE
from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package, rotation_inputs
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
        fill_rotations(self.buffers, self._tables, positions)
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


def fill_rotations(buffers: Mapping[str, Array], tables: HostTables, positions: Sequence[int]) -> None:
    """Fill the rotation inputs for tokens at these positions, which are below the context."""
    indices = list(positions)
    for number, rotation in enumerate(tables.rotations):
        for name, table in zip(rotation_inputs(number), rotation, strict=True):
            rows, half = buffers[name][0, 0], table.shape[1]
            rows[:half, : len(indices)] = table[indices].T
            rows[half:, : len(indices)] = rows[:half, : len(indices)]


class PackageCalls:
    """The functions of one package and their buffers. Logits are valid until the next ones."""

    def __init__(self, package: Package, tables: HostTables, runtime: Runtime) -> None:
        self.widest = package.widths[-1]
        """Most tokens of one call."""
        self.head_rows = package.head_rows
        self.masks = package.masks
        self.predict = runtime.predict
        self._outputs = package.outputs
        self._inputs = {width: CallInputs(package, tables, width) for width in package.widths}
        padded = -(-package.head_rows // GROUP_SIZE) * GROUP_SIZE
        self._logits: Single = np.full((self.widest, padded), -np.inf, np.float32)

    def place(self, tokens: Sequence[int], positions: Sequence[int]) -> tuple[str, dict[str, Array]]:
        """The function of the smallest width for these tokens, and `CallInputs.place`."""
        inputs = next(each for width, each in self._inputs.items() if width >= len(tokens))
        return inputs.function, inputs.place(tokens, positions)

    def logits(self, outputs: Mapping[str, Array], rows: Sequence[int]) -> Single:
        """(rows, the head's rows padded with -inf to whole groups) of these rows of a call."""
        begin = 0
        for index, size in enumerate(self._outputs):
            self._logits[: len(rows), begin : begin + size] = outputs[f"logits_{index}"][0, 0, rows]
            begin += size
        return self._logits[: len(rows)]


class PackageForward(PackageCalls):
    """Forwards over the rows of sequences. One of a lone sequence allocates nothing that grows with the context."""

    def __init__(self, package: Package, tables: HostTables, runtime: Runtime) -> None:
        super().__init__(package, tables, runtime)
        self._joint = JointMemory(package)

    def joins(self, parts: Sequence[tuple[HostMemory, int]]) -> bool:
        """Whether one call can evaluate so many more rows of each of these sequences."""
        fits = sum(rows for _, rows in parts) <= self.widest
        return fits and self._joint.fits([(memory, memory.slots.taken + rows) for memory, rows in parts])

    def run(self, parts: Sequence[CallPart], given: Single | None = None) -> dict[str, Array]:
        """Evaluate these parts, of different sequences that join, and store their keys and values. The outputs of the
        call. `given`: the (rows, hidden) second inputs of a drafter's rows."""
        tokens = [token for part in parts for token in part.tokens]
        function, data = self.place(tokens, [position for part in parts for position in part.positions])
        if given is not None:
            states = data["g"][0, :, 0]
            states[:, : len(given)] = given.T
            # Padding repeats a row, as in `CallInputs`.
            states[:, len(given) :] = states[:, len(given) - 1 : len(given)]
        if len(parts) == 1:
            self._joint.count_step()
            kv, fill_mask = parts[0].memory.kv, parts[0].fill_mask
        else:
            call = self._joint.call(parts)
            kv, fill_mask = call.kv, call.fill_mask
        for name, window in self.masks.items():
            fill_mask(data[name][0, 0], window)
        placed = list(zip(parts, part_rows(parts), strict=True))
        if "past" in data:
            past, ancestors = data["past"], data["ancestors"]
            past[:], ancestors[:] = 0, 0
            for part, rows in placed:
                part.memory.fill_convolutions(part.numbers, past[..., rows], ancestors[..., rows, rows])
        outputs = self.predict(function, {**data, "kv": kv})
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
        """Run these parts: `logits` of all their rows."""
        return self.logits(self.run(parts), range(sum(len(part.tokens) for part in parts)))


def chain(numbers: range) -> list[int]:
    """Parents of consecutive rows; the first row follows the committed prefix."""
    return [PREFIX, *numbers[:-1]] if numbers else []


_LARGEST = np.float32(65_504)
"""fp16's largest number."""


class FeatureReader:
    """The function of one package and its buffers, which all sequences share."""

    def __init__(self, package: Package, tables: HostTables, runtime: Runtime) -> None:
        assert package.conditioning is not None
        self._conditioning = package.conditioning
        self._epsilon = np.float32(package.shape.epsilon)
        self._tables = tables
        self._runtime = runtime
        shapes = package.feature_input_shapes
        self._buffers: dict[str, Array] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self._turns = "cos" in shapes

    def read(self, features: Single, positions: Sequence[int]) -> Iterator[tuple[int, dict[str, Array]]]:
        """For the tokens with these (tokens, outputs * width) features, call by call: how many tokens, and the outputs
        of their call. Features are finite; those beyond fp16's range are clipped to it."""
        inputs = self._normed(features) * np.float32(self._conditioning.scale)
        width = self._conditioning.width
        for begin in range(0, len(inputs), width):
            part = np.clip(inputs[begin : begin + width], -_LARGEST, _LARGEST)
            self._fill(part)
            if self._turns:
                fill_rotations(self._buffers, self._tables, positions[begin : begin + width])
            yield len(part), self._runtime.predict(self._conditioning.function, self._buffers)

    def _fill(self, rows: Single) -> None:
        first = 0
        for index, columns in enumerate(self._conditioning.parts):
            buffer = self._buffers[f"features_{index}"][0, :, 0]
            buffer[:, : len(rows)] = rows[:, first : first + columns].T
            # Padding repeats a token, as in `CallInputs`.
            buffer[:, len(rows) :] = buffer[:, len(rows) - 1 : len(rows)]
            first += columns

    def _normed(self, features: Single) -> Single:
        """The inputs of fc: some forms of EAGLE-3 norm the features first, all together or each output."""
        parameters, form = self._tables.parameters, self._conditioning.eagle3
        if form is not None and form.norm_before_fc:
            features = self._rms(features, parameters["input_norm.weight"])
        if form is not None and form.fc_norm:
            outputs = np.split(features, len(form.outputs), axis=1)
            weights = (parameters[f"fc_norm.{index}.weight"] for index in range(len(outputs)))
            features = np.concatenate([self._rms(*each) for each in zip(outputs, weights, strict=True)], axis=1)
        return features

    def _rms(self, rows: Single, weight: Array) -> Single:
        mean = np.mean(np.square(rows, dtype=np.float64), axis=1, keepdims=True)
        return (rows / np.sqrt(mean + self._epsilon) * weight).astype(np.float32)
