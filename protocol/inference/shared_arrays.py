"""MLX arrays to the arrays of shared memory and back."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ElementType


def to_numpy(rows: Sequence[mx.array]) -> LayerRows:
    """(heads, rows, size) of each (1, heads, rows, size), as views of its own memory where that is possible;
    bfloat16 as its bits.

    While a view exists, MLX copies its array before it writes to it: drop the views soon.
    """
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in rows]
    mx.eval(plain)
    return [np.asarray(array)[0] for array in plain]


def to_mlx(rows: NDArray[Any], element: ElementType) -> mx.array:
    """A copy, (1, heads, rows, size). The rows may be part of a bigger array."""
    # MLX takes an array with gaps element by element; numpy closes the gaps faster.
    array = mx.array(np.ascontiguousarray(rows[None]))
    return array.view(mx.bfloat16) if element is ElementType.BFLOAT16 else array
