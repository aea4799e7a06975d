"""Rotary positions as tables, measured on mlx-lm's rope, so that every scaling that mlx-lm supports is the same.

Rope rotates pairs (a, b) of a head's features by an angle that grows with the position, and may scale them:
(a, b) becomes m (a cos - b sin, a sin + b cos). For a = 1 and b = 0 the result is (m cos, m sin).
Which features form a pair differs between models. In a package, pair i is features i and i + head / 2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from draft_worker.coreml.package import Half, Single


class Rotation(NamedTuple):
    """Two tables of shape (positions, head / 2)."""

    cosine: Single
    sine: Single

    @classmethod
    def measure(cls, rope: Any, order: Sequence[int], positions: int) -> "Rotation":
        """`rope`: the rope of an mlx-lm attention, called on (1, 1, positions, head) float32. `order`: `pair_order`."""
        half = len(order) // 2
        probe = np.zeros((1, 1, positions, len(order)), np.float32)
        probe[..., order[:half]] = 1
        rotated = np.array(rope(mx.array(probe)))[0, 0]
        return cls(np.ascontiguousarray(rotated[:, order[:half]]), np.ascontiguousarray(rotated[:, order[half:]]))


def pair_order(head: int, rotated: int, interleaved: bool) -> list[int]:
    """A head's features in the order of the package: feature `order[i]` and `order[i + head / 2]` are a pair.

    `rotated`: the first features, which rope rotates; the others form pairs that keep their values. `interleaved`:
    rope pairs features (0, 1), (2, 3), ... instead of (i, i + rotated / 2). Both numbers are even.
    """
    features, rest = list(range(rotated)), list(range(rotated, head))
    first, second = (
        (features[::2], features[1::2]) if interleaved else (features[: rotated // 2], features[rotated // 2 :])
    )
    return [*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :]]


def reorder(rows: Half, order: Sequence[int]) -> Half:
    """The rows of a projection to queries or keys, its biases, or a head norm's weights, each head in `order`.

    Queries and keys are reordered alike, so their products stay the same.
    """
    return np.ascontiguousarray(rows.reshape(-1, len(order), *rows.shape[1:])[:, order]).reshape(rows.shape)
