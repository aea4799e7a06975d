"""A drafter's matrix on its way to the target, and the rows that the target projects by it. Knows no rings."""

from typing import Any

import mlx.core as mx
import numpy as np

from protocol.features.blocks import projection_key
from protocol.inference.layer_cache import ELEMENT_TYPES
from protocol.kv.arena_header import ElementType
from protocol.messages.features import FeatureForm, ProjectionShipment, ProjectionWanted

_MOST_BYTES = 512 << 20
"""Of a matrix. That of a drafter that reads five outputs of 5,120 numbers has 250 MiB."""
_TYPES = {element: kind for kind, element in ELEMENT_TYPES.items()}


class ProjectionIntake:
    """Asks for a matrix block after block, and checks the whole by its key. What is not the next block is dropped."""

    def __init__(self, form: FeatureForm) -> None:
        """`form`: that of the projected rows."""
        assert form.projection is not None
        self.form = form
        self.matrix: mx.array | None = None
        """(width of the projection, outputs * width), once it is there."""
        self.useless = False
        """It is too large, or what came was another one."""
        self._projection = form.projection
        self._blocks: list[bytes] = []
        self._rows = 0
        self._element: ElementType | None = None

    @property
    def wanted(self) -> ProjectionWanted | None:
        """What to ask for now; a request that was lost is repeated so."""
        if self.matrix is not None or self.useless:
            return None
        return ProjectionWanted(self._projection.key, self._rows)

    def add(self, shipment: ProjectionShipment) -> None:
        block, payload = shipment
        if self.wanted != ProjectionWanted(block.key, block.first):
            return
        element, rows = ElementType(block.element), self._rows + block.rows
        row_bytes = self.form.joined * element.size
        if self._projection.width * row_bytes > _MOST_BYTES or self._element not in (None, element):
            self._give_up()
        elif rows <= self._projection.width and len(payload) == block.rows * row_bytes:
            self._blocks.append(payload)
            self._rows, self._element = rows, element
            if rows == self._projection.width:
                self._finish(element)

    def _finish(self, element: ElementType) -> None:
        whole = b"".join(self._blocks)
        self._blocks = []
        if projection_key([whole]) != self._projection.key:
            self._give_up()
            return
        numbers = mx.array(np.frombuffer(whole, element.numpy_name).reshape(self._projection.width, self.form.joined))
        matrix = numbers.view(_TYPES[element]) if element is ElementType.BFLOAT16 else numbers
        # On a processor MLX's products in half precision take a hundred times as long.
        self.matrix = matrix.astype(mx.float32) if mx.default_device() == mx.Device(mx.cpu) else matrix
        mx.eval(self.matrix)

    def _give_up(self) -> None:
        self.useless, self._blocks = True, []


def projected(rows: Any, element: ElementType, matrix: mx.array) -> Any:
    """(L, width of the projection) of (L, outputs * width) recorded rows; both of this element type, bfloat16 as its
    bits."""
    numbers = mx.array(rows)
    if element is ElementType.BFLOAT16:
        numbers = numbers.view(mx.bfloat16)
    found = (numbers.astype(matrix.dtype) @ matrix.T).astype(_TYPES[element])
    return np.asarray(found.view(mx.uint16) if element is ElementType.BFLOAT16 else found)
