"""Rotary embeddings on a Linux processor: angles are computed once in a forward, not by each layer, for queries and for
keys.

Without a GPU `mx.fast.rope` is some twenty operations (MLX 0.32, mlx/fast.cpp), most of them for cosines and sines that
depend on positions alone. For a few tokens they take longer than the six that are left. A layer whose rope holds an
array of frequencies of its own (Llama 3's scaling, YaRN) has angles of its own, for its queries and keys together.
"""

from typing import NamedTuple

import mlx.core as mx

_STOCK = mx.fast.rope


class Rotation:
    """`mx.fast.rope`, to the last bit, for the layers of one forward."""

    def __init__(self) -> None:
        self._angles: dict[tuple[object, ...], _Angles] = {}

    def __call__(
        self,
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: mx.Stream | None = None,
    ) -> mx.array:
        """(B, heads, L, size), the first `dims` numbers rotated by the positions from `offset` on: one, or (B,)."""
        if stream is not None or a.ndim != 4 or a.dtype != mx.float32:
            return _STOCK(
                a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, stream=stream
            )
        length, size = a.shape[2:]
        place = offset if isinstance(offset, int) else id(offset)
        key = dims, traditional, base, scale, place, id(freqs), length
        angles = self._angles.get(key)
        if angles is None:
            begins = 1 if isinstance(offset, int) else offset.size
            ones = mx.broadcast_to(_unit(dims, traditional), (begins, 1, length, dims))
            turned = _STOCK(ones, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs)
            angles = self._angles[key] = _Angles.of(turned, traditional, (offset, freqs))
        pairs = mx.unflatten(a if dims == size else a[..., :dims], -1, (-1, 2) if traditional else (2, -1))
        rotated = mx.flatten(pairs * angles.cosines + _exchanged(pairs, traditional) * angles.sines, -2)
        return rotated if dims == size else mx.concatenate([rotated, a[..., dims:]], axis=-1)


class _Angles(NamedTuple):
    """What pairs (a, b) of numbers are multiplied with: (B or 1, 1, L, 2, dims / 2), with the last two axes exchanged
    where pairs are neighbours (`traditional`)."""

    cosines: mx.array
    """(cos, cos), for (a, b)."""
    sines: mx.array
    """(-sin, sin), for (b, a)."""
    given: tuple[object, ...]
    """Arrays by whose identity these angles are found: none may be freed before them."""

    @classmethod
    def of(cls, rotated: mx.array, traditional: bool, given: tuple[object, ...]) -> "_Angles":
        """From pairs (1, 0), which a rotation makes (cos, sin)."""
        axis = -1 if traditional else -2
        cosine, sine = mx.split(mx.unflatten(rotated, -1, (-1, 2) if traditional else (2, -1)), 2, axis)
        return cls(cosine, mx.concatenate([-sine, sine], axis=axis), given)


def _unit(dims: int, traditional: bool) -> mx.array:
    """(dims,): pairs (1, 0)."""
    numbers = mx.arange(dims)
    return mx.where(numbers % 2 == 0 if traditional else numbers < dims // 2, mx.array(1.0), mx.array(0.0))


def _exchanged(pairs: mx.array, traditional: bool) -> mx.array:
    return pairs[..., ::-1] if traditional else pairs[..., ::-1, :]
