"""Keys and values between MLX and numpy, bit for bit. Knows element types; no slots, no model."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from protocol.kv.arena_header import ElementType

_TYPES = {
    mx.float16: ElementType.FLOAT16,
    mx.bfloat16: ElementType.BFLOAT16,
    mx.float32: ElementType.FLOAT32,
}


def element_type(array: mx.array) -> ElementType | None:
    """What an arena calls the array's type, if it can hold it."""
    return _TYPES.get(array.dtype)


def to_numpy(arrays: Sequence[mx.array]) -> list[NDArray[Any]]:
    """Views of the arrays' own memory where that is possible; bfloat16 as its bits.

    As long as a view lives, MLX copies its array before it writes to it: let go of them soon.
    """
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in arrays]
    mx.eval(plain)
    return [np.asarray(array) for array in plain]


def to_mlx(rows: NDArray[Any], like: ElementType) -> mx.array:
    """A copy. The rows may be part of a bigger array."""
    # MLX takes an array with gaps element by element; numpy closes the gaps faster.
    array = mx.array(np.ascontiguousarray(rows))
    return array.view(mx.bfloat16) if like is ElementType.BFLOAT16 else array
