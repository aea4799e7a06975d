"""How far logits are from those that they should be. Knows no model."""

import mlx.core as mx


def deviation(logits: mx.array, expected: mx.array) -> float:
    """The mean, in standard deviations, over the tokens that are not ruled out.

    Of logits of any element type: sums over a vocabulary overflow float16, and lose small terms in bfloat16.
    """
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    possible = mx.isfinite(expected)
    difference = mx.where(possible, mx.abs(logits - expected), 0.0)
    kept = mx.where(possible, expected, 0.0)
    found = (difference.mean() / mx.maximum(mx.std(kept), 1e-6)).item()
    assert isinstance(found, float)
    return found
