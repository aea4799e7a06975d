"""The matrix of a drafter's first step, which a target on another machine projects its features by. Knows no messages
but those about it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.features.blocks import projection_key
from protocol.inference.layer_cache import ELEMENT_TYPES
from protocol.kv.arena_header import ElementType
from protocol.messages.features import (
    FeatureForm,
    Projection,
    ProjectionBlock,
    ProjectionShipment,
    ProjectionWanted,
)
from protocol.messages.remote import MAX_PAYLOAD


class ProjectionMatrix:
    """The weights of a linear layer, perhaps quantised, as rows of plain numbers."""

    def __init__(self, layer: Any, form: FeatureForm) -> None:
        """`layer`: of `mlx.nn`, linear. `form`: what the drafter reads; its outputs, joined, are the layer's input. Use
        `of`."""
        self._layer = layer
        self._element = ELEMENT_TYPES[self._numbers(0, 1).dtype]
        self._rows = MAX_PAYLOAD // (form.joined * self._element.size)
        self._width = int(layer.weight.shape[0])
        self.form = FeatureForm(
            form.outputs, form.width, Projection(self._width, projection_key(self._bytes())) if self._rows else None
        )
        """The same, projected too."""

    @classmethod
    def of(cls, layer: Any, form: FeatureForm) -> "ProjectionMatrix | None":
        """None if rows would not become smaller, or if a row of the matrix is larger than a block."""
        if layer.weight.shape[0] >= form.joined:
            return None
        made = cls(layer, form)
        return made if made.form.projection is not None else None

    def answer(self, wanted: ProjectionWanted) -> ProjectionShipment | None:
        """The rows that a target asks for; None if it asks for those of another matrix."""
        assert self.form.projection is not None
        count = min(self._rows, self._width - wanted.first)
        if wanted.key != self.form.projection.key or count <= 0:
            return None
        block = ProjectionBlock(wanted.key, wanted.first, count, int(self._element))
        return ProjectionShipment(block, self._part(wanted.first))

    def _bytes(self) -> Iterator[bytes]:
        return map(self._part, range(0, self._width, self._rows))

    def _part(self, first: int) -> bytes:
        """Of the rows of one block."""
        numbers = self._numbers(first, first + self._rows)
        return np.asarray(numbers.view(mx.uint16) if self._element is ElementType.BFLOAT16 else numbers).tobytes()

    def _numbers(self, first: int, stop: int) -> mx.array:
        rows, layer = slice(first, stop), self._layer
        if "scales" in layer:
            biases = layer.get("biases")
            return mx.dequantize(
                layer.weight[rows],
                layer.scales[rows],
                None if biases is None else biases[rows],
                layer.group_size,
                layer.bits,
                layer.mode,
            )
        return layer.weight[rows]


def in_groups(rows: Sequence[npt.NDArray[Any]], element: mx.Dtype, compute: Callable[[mx.array], mx.array]) -> mx.array:
    """`compute` of all (n, width) rows in this type, joined: in one call for neighbours of the same width. Some may be
    projected."""
    groups = (np.concatenate(list(group)) for _, group in groupby(rows, lambda each: each.shape[1]))
    parts = [compute(mx.array(group).astype(element)) for group in groups]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)
