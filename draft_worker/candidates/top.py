"""The best few of a vocabulary, a row at a time, in MLX. Knows no sampling."""

import mlx.core as mx

_BLOCK = 64
"""Entries whose maximum stands for them. Partitioning a whole vocabulary takes milliseconds."""


def top(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Ids and scores (L, count) of the best entries of each row of (L, V), best first; of equals, lower ids first.

    The best `count` entries lie in the `count` blocks with the highest maxima: it looks only there.
    """
    values, ids = _shortlist(scores, count)
    if count < values.shape[-1]:
        # Ascending again, so that the sort below, which is stable, puts the lower of two equal ids first.
        chosen = mx.sort(mx.argpartition(-values, count - 1, axis=-1)[:, :count], axis=-1)
        values, ids = mx.take_along_axis(values, chosen, axis=-1), mx.take_along_axis(ids, chosen, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _shortlist(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Values and ids, ids ascending, of the entries among which the best `count` of each row are."""
    rows, width = scores.shape
    blocks = -(-width // _BLOCK)
    if 2 * count > blocks:
        return scores, mx.broadcast_to(mx.arange(width), scores.shape)
    padding = blocks * _BLOCK - width
    padded = mx.pad(scores, [(0, 0), (0, padding)], constant_values=-mx.inf) if padding else scores
    blocked = padded.reshape(rows, blocks, _BLOCK)
    best = mx.sort(mx.argpartition(-blocked.max(axis=-1), count - 1, axis=-1)[:, :count], axis=-1)[:, :, None]
    values = mx.take_along_axis(blocked, best, axis=1)
    ids = best * _BLOCK + mx.arange(_BLOCK)
    return values.reshape(rows, -1), ids.reshape(rows, -1)
