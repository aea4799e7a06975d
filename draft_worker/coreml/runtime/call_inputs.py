"""The inputs that the host computes from a call's tokens and positions, in buffers filled in place.

All sequences share them: a call is over before the next one begins, and Core ML may read its inputs after a call has
returned (`lent_arrays`). They are fp32, because coremltools converts fp16 inputs to fp32.
"""

from collections.abc import Sequence

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package, rotation_inputs


class CallInputs:
    """The inputs of the function for one width, without `kv`."""

    def __init__(self, package: Package, tables: HostTables, width: int) -> None:
        shape = package.shape
        self.width = width
        self._tables = tables
        self._scale = np.float32(shape.embedding_scale)
        self._half = shape.head // 2
        shapes = package.input_shapes(width)
        self.buffers: dict[str, Array] = {name: np.zeros(size, np.float32) for name, size in shapes.items()}
        if package.cache == "state":
            self.buffers["begin"] = np.zeros(4, np.int32)
            self.buffers["end"] = np.array([2 * shape.attentions, shape.key_heads, 0, shape.head], np.int32)

    def place(self, tokens: Sequence[int], positions: Sequence[int]) -> dict[str, Array]:
        """The buffers for up to `width` tokens; the outputs behind them are undefined.

        The caller fills the masks, and what depends on the cache. Positions are below the context.
        """
        self._embed(tokens)
        indices = list(positions)
        for number, rotation in enumerate(self._tables.rotations):
            for name, table in zip(rotation_inputs(number), rotation, strict=True):
                rows = self.buffers[name][0, 0]
                rows[: self._half, : len(indices)] = table[indices].T
                rows[self._half :, : len(indices)] = rows[: self._half, : len(indices)]
        if self._tables.position_scale is not None:
            self.buffers["position_scale"][0, 0, 0, : len(indices)] = self._tables.position_scale[indices]
        return self.buffers

    def _embed(self, tokens: Sequence[int]) -> None:
        rows = self.buffers["x"][0, :, 0]
        rows[:, : len(tokens)] = self._tables.embedding[list(tokens)].T
        if self._scale != 1:
            rows[:, : len(tokens)] *= self._scale
        # Padding repeats a token: with zeros, a device that flushes the norm's epsilon would give NaN.
        rows[:, len(tokens) :] = rows[:, len(tokens) - 1 : len(tokens)]
