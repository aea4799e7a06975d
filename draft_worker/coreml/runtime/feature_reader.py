"""Calls of the function that reads the target's features. Knows no tree."""

from collections.abc import Iterator, Sequence

import numpy as np

from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.call_inputs import fill_rotations
from draft_worker.coreml.runtime.interface import Runtime

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
