"""The inputs that the host computes from a call's tokens and positions, in buffers filled in place.

All sequences share them: a call is over before the next one begins, and Core ML may read its inputs after a call has
returned (`apple.lend`). They are fp32, because coremltools converts fp16 inputs to fp32.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package, rotation_inputs


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
