"""The inputs that the host computes for a call: embeddings, rotations and mask, in buffers filled in place.

All sequences share them: a call is over before the next one begins, and Core ML may read its inputs after a call has
returned (`lent_arrays`). They are fp32, because coremltools converts fp16 inputs to fp32.
"""

from collections.abc import Sequence

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.converted import HostTables
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.tree_slots import HIDDEN
from protocol.inference.slots import SlotMask


class CallInputs:
    """The inputs of the function for one width, without `kv`."""

    def __init__(self, package: Package, tables: HostTables, width: int) -> None:
        shape = package.shape
        self.width = width
        self._package = package
        self._tables = tables
        self._half = shape.head // 2
        shapes = package.input_shapes(width)
        self.buffers: dict[str, Array] = {name: np.zeros(size, np.float32) for name, size in shapes.items()}
        if package.cache == "state":
            self.buffers["begin"] = np.zeros(4, np.int32)
            self.buffers["end"] = np.array([2 * shape.layers, shape.key_heads, 0, shape.head], np.int32)

    def fill(self, tokens: Sequence[int], positions: Sequence[int], seen: SlotMask) -> dict[str, Array]:
        """Inputs for up to `width` tokens; the outputs behind them are undefined.

        `seen`: (tokens, slots + tokens), the `SlotTable.mask` of the slots in use and of these tokens. Positions are
        below the context. With the cache as a state, the new rows go to the next `width` slots, which must exist.
        """
        count = len(tokens)
        slots = seen.shape[1] - count
        self.place(tokens, positions)
        mask = self.buffers["mask"][0, 0]
        mask[:] = HIDDEN
        mask[:count, :slots][seen[:, :slots]] = 0
        context = self._package.context
        mask[:count, context : context + count][seen[:, slots:]] = 0
        if self._package.cache == "state":
            self.buffers["begin"][2], self.buffers["end"][2] = slots, slots + self.width
        return self.buffers

    def place(self, tokens: Sequence[int], positions: Sequence[int]) -> dict[str, Array]:
        """Like `fill`, without `mask`, and with a state without `begin` and `end`: the caller fills them."""
        self._embed(tokens)
        self._rotate(positions)
        return self.buffers

    def _embed(self, tokens: Sequence[int]) -> None:
        rows = self.buffers["x"][0, :, 0]
        rows[:, : len(tokens)] = self._tables.embedding[list(tokens)].T
        # Padding repeats a token: with zeros, a device that flushes the norm's epsilon would give NaN.
        rows[:, len(tokens) :] = rows[:, len(tokens) - 1 : len(tokens)]

    def _rotate(self, positions: Sequence[int]) -> None:
        indices, count = list(positions), len(positions)
        for name, table in zip(("cos", "sin"), self._tables.rotation, strict=True):
            rows = self.buffers[name][0, 0]
            rows[: self._half, :count] = table[indices].T
            rows[self._half :, :count] = rows[: self._half, :count]


def join_logits(outputs: dict[str, Array], package: Package, count: int) -> Array:
    """(count, rows of the head) logits of the first `count` tokens of a call."""
    return np.concatenate([outputs[f"logits_{index}"][0, 0, :count] for index in range(len(package.outputs))], axis=-1)
