"""Rotary positions as tables, measured on mlx-lm's rope, so that every scaling that mlx-lm supports is the same.

Rope rotates each pair (a, b) of a head's features by an angle that grows with the position, and may scale it:
(a, b) becomes m (a cos - b sin, a sin + b cos). For a = 1 and b = 0 the result is (m cos, m sin).
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from draft_worker.coreml.arrays import Half, Single


class Rotation(NamedTuple):
    """Two tables of shape (positions, head / 2): pair i is features i and i + head / 2."""

    cosine: Single
    sine: Single

    @classmethod
    def measure(cls, rope: Any, head: int, positions: int) -> "Rotation":
        """`rope`: the rope of an mlx-lm attention, called on (1, 1, positions, head) float32."""
        probe = np.zeros((1, 1, positions, head), np.float32)
        if getattr(rope, "traditional", False):
            probe[..., ::2] = 1
            rotated = np.array(rope(mx.array(probe)))[0, 0]
            return cls(np.ascontiguousarray(rotated[:, ::2]), np.ascontiguousarray(rotated[:, 1::2]))
        probe[..., : head // 2] = 1
        rotated = np.array(rope(mx.array(probe)))[0, 0]
        return cls(np.ascontiguousarray(rotated[:, : head // 2]), np.ascontiguousarray(rotated[:, head // 2 :]))


def separate_halves(rows: Half, head: int) -> Half:
    """Reorder a projection's weights or biases from interleaved pairs (0, 1), (2, 3), ... to pairs (i, i + head / 2).

    Queries and keys are permuted alike, so their products stay the same.
    """
    pairs = rows.reshape(-1, head // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
