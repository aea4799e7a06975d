"""The inputs that short convolutions need of a token's ancestors. The host keeps them like keys and values, by slot."""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from draft_worker.coreml.arrays import Array, Single
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.tree_slots import TreeSlots


class ConvolutionHistory:
    """The convolutions' rows of one sequence's cache, which has `Package.host_shape`."""

    def __init__(self, package: Package, cache: Single) -> None:
        shape = package.shape
        begin = package.cache_shape[0]
        rows = cache[begin : begin + shape.sharing * shape.convolutions]
        self._rows = rows.reshape(shape.convolutions, -1, *rows.shape[2:])
        self._ancestors = shape.taps - 1

    def fill(self, slots: TreeSlots, numbers: Sequence[int], buffers: Mapping[str, Array]) -> None:
        """Fill the inputs `past` and `ancestors` of a call that evaluates these rows, in this order.

        An ancestor's input comes from its slot, or from the call itself, if the ancestor is one of its rows.
        """
        past, chosen = buffers["past"], buffers["ancestors"]
        past[:], chosen[:] = 0, 0
        column = {number: index for index, number in enumerate(numbers)}
        kept: list[tuple[int, int, int]] = []
        for index, number in enumerate(numbers):
            for distance, (row, slot) in enumerate(islice(slots.before(number), self._ancestors)):
                if row in column:
                    chosen[0, distance, column[row], index] = 1
                else:
                    kept.append((distance, index, slot))
        if kept:
            distances, columns, places = (list(each) for each in zip(*kept, strict=True))
            # (ancestors, convolutions, hidden): numpy puts the axis of two separated index lists first.
            inputs = np.moveaxis(self._rows[:, :, places], 2, 0).reshape(len(kept), past.shape[0], -1)
            past[:, distances, :, columns] = inputs
