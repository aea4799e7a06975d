"""Keys and values in fewer bits: which layers of a model take them, and in which form. Knows no kind of layer cache.

A layer whose head size no group of the quantization divides keeps its element type, and so does one without rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from protocol.inference.device import compute
from protocol.inference.layer_cache import LayerCache
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.slots import PREFIX
from protocol.messages.base import Level

Encodings: TypeAlias = Sequence[Any]
"""Of each layer cache the argument of `encode`, or None; empty if no layer is quantized."""
_PROMPT = tuple(range(16))
_TREE = (3, 5, 7), (PREFIX, 0, 0)
_TOLERANCE = 0.1
"""Largest mean deviation of logits that rounding explains, in standard deviations."""


def encode(caches: Sequence[LayerCache], encodings: Encodings) -> None:
    """Let new caches hold their keys and values in these forms."""
    for cache, encoding in zip(caches, encodings or [None] * len(caches), strict=True):
        if isinstance(cache, FullAttentionCache) and encoding is not None:
            cache.encode(encoding)


def proved_encodings(new_sequence: Callable[[Encodings], Any], level: Level, bits: int) -> Encodings:
    """The forms in which the layers of a model hold keys and values of `bits` bits; empty if no layer can.

    Attention reads them as they are if that gives the logits that it gives with the same rows unpacked. It does not
    where a layer has attention of its own, latent keys or attention sinks: mlx-lm's quantized attention knows none of
    them. Then the rows are unpacked for each forward, and equally where `unpacking_is_faster`.
    """
    plain = new_sequence(())
    plain.prefill(_PROMPT)
    fused, unpacked = (
        [cache.quantized(bits, each) if isinstance(cache, FullAttentionCache) else None for cache in plain.caches]
        for each in (True, False)
    )
    if not any(unpacked):
        return ()
    if unpacking_is_faster():
        return unpacked
    expected = _logits(new_sequence(unpacked), level)
    compute(expected)
    try:
        found = _logits(new_sequence(fused), level)
    except (TypeError, ValueError, AttributeError):
        return unpacked
    return fused if deviation(found, expected) < _TOLERANCE else unpacked


def unpacking_is_faster() -> bool:
    """On a processor: quantized products take twice the time of unpacking and float32 products."""
    return mx.default_device() == mx.Device(mx.cpu)


def _logits(sequence: Any, level: Level) -> mx.array:
    """Behind a prompt: of a tree if the model evaluates trees, else of one token."""
    sequence.prefill(_PROMPT)
    tokens, parents = _TREE if level == "tree" else (_TREE[0][:1], _TREE[1][:1])
    return sequence.evaluate(tokens, [sequence.next_row + each if each != PREFIX else PREFIX for each in parents])


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
