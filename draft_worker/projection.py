"""Features of a target as a network's first step reads them."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def in_groups(rows: Sequence[npt.NDArray[Any]], compute: Callable[[npt.NDArray[Any]], mx.array]) -> mx.array:
    """`compute` of all (n, width) rows, joined: in one call for neighbours of the same width."""
    parts = [compute(np.concatenate(list(group))) for _, group in groupby(rows, lambda each: each.shape[1])]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)
