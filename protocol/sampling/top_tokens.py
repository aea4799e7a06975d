"""The best entries of long rows without a sort of whole rows, and the logarithm of a row's mass.

On Metal `topk`, `partition` and `argpartition` sort too (MLX, mlx/backend/metal/sort.cpp). So a row is divided into
blocks: its best n entries lie in the n blocks with the highest maxima, and only those blocks are sorted. Knows no
tokens, filters or noise.
"""

import math

import mlx.core as mx
import numpy as np


def top(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Ids and scores (L, count) of the best entries of each row of (L, V), best first; of equals, lower ids first."""
    blocked = _blocked(scores, count)
    rows, _, size = blocked.shape
    # MLX sorts stably: of two equal maxima, and below of two equal entries, the one with lower ids comes first.
    best = mx.sort(mx.argsort(-blocked.max(axis=-1), axis=-1)[:, :count], axis=-1)[:, :, None]
    values = mx.reshape(mx.take_along_axis(blocked, best, axis=1), (rows, -1))
    ids = mx.reshape(best * size + mx.arange(size), (rows, -1))
    order = mx.argsort(-values, axis=-1)[:, :count]
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def top_values(scores: mx.array, count: int) -> mx.array:
    """The scores of `top`: (L, count), falling."""
    blocked = _blocked(scores, count)
    if count < blocked.shape[1]:
        best = mx.argpartition(-blocked.max(axis=-1), count - 1, axis=-1)[:, :count, None]
        blocked = mx.take_along_axis(blocked, best, axis=1)
    values = mx.reshape(blocked, (len(scores), -1))
    return -mx.sort(mx.partition(-values, count - 1, axis=-1)[:, :count], axis=-1)


def log_total(rows: mx.array) -> mx.array:
    """(L, 1) float32: log(sum(exp(row))) of each row of (L, V). A row's result does not depend on the other rows."""
    if not on_host():
        return mx.logsumexp(rows, axis=-1, keepdims=True)
    # On x86, MLX computes exponentials one by one; numpy has vector code and reads the same memory.
    return mx.array([[log_of_mass(row)] for row in np.asarray(rows)], dtype=mx.float32)


def on_host() -> bool:
    """Whether MLX computes on the processor, most of it on one thread and without vectors, and shares its memory."""
    return mx.default_device() == mx.Device(mx.cpu)


def log_of_mass(row: np.ndarray) -> float:
    """log(sum(exp(row)))."""
    best = row.max()
    return float(best + np.log(np.exp(row - best).sum())) if np.isfinite(best) else float(best)


def _blocked(scores: mx.array, count: int) -> mx.array:
    """(L, blocks, size): the rows, padded with -inf to whole blocks.

    The size is a power of two near sqrt(V / count): about as many maxima are sorted as entries of the best blocks.
    """
    rows, width = scores.shape
    size = 1 << max(0, round(math.log2(width / count) / 2))
    padding = -width % size
    padded = mx.pad(scores, [(0, 0), (0, padding)], constant_values=-mx.inf) if padding else scores
    return mx.reshape(padded, (rows, -1, size))
