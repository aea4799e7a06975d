"""Attention on a Linux processor: by the library that multiplies for MLX, without it with numpy's exponentials.

MLX 0.32 has vector code for exponentials only with Apple's Accelerate (mlx/backend/cpu/simd). For a prompt of a few
hundred tokens they take longer than the products of the default target. And it computes the attention of a layer in
several operations, each of which writes and reads all scores: see `orchestrator/machine/blas/bridge.c`.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.inference.device import compute

Scores: TypeAlias = npt.NDArray[np.float32]

_LEAST = 1 << 15
"""Attention scores of a layer. With fewer, waiting for each layer costs more than the exponentials."""
_ROWS = 32
"""Up to so many tokens a row's products don't depend on the other rows (`orchestrator/machine/blas`). Such forwards
come here with however few scores, so that a row has the same bits alone and beside others."""
_KEYS, _LANES = 256, 16
"""Keys of a partial sum of the library, and numbers of a vector there."""
_SCRATCH = 8 << 20
"""Numbers of partial sums that are held at once, at least those of two times `_ROWS` tokens."""
_BLOCK = 1 << 16
"""Scores that are normalised at once: they stay in the processor's cache."""
_CHUNK = 1024
"""Tokens whose values all rows of a few multiply together: they stay in the processor's cache meanwhile."""
_SUMMED = 64
"""Scores whose sum is one term of a row's sum."""
_STOCK = mx.fast.scaled_dot_product_attention


@contextmanager
def processor_operations() -> Generator[None]:
    """For one forward without gradients: where this process computes on a Linux processor, MLX's attention in float32
    is `attention`, whose softmax is no part of MLX's graph."""
    if sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu):
        yield
        return
    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = _STOCK


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    stream: mx.Stream | None = None,
) -> mx.array:
    """softmax(scale q k^T + mask) v, (B, H, L, size), as `mx.fast.scaled_dot_product_attention` of (B, H, L, width)
    queries, (B, H', T, width) keys and (B, H', T, size) values. A query's result does not depend on the other ones."""
    batch, heads, length, _ = q.shape
    few = length > _ROWS and batch * heads * length * k.shape[2] < _LEAST
    if sinks is not None or stream or few or any(each.dtype != mx.float32 for each in (q, k, v)):
        return _STOCK(q, k, v, scale=scale, mask=mask, sinks=sinks, stream=stream)
    kernel = attention_kernel()
    return _vectors(q, k, v, scale, mask) if kernel is None else _by_library(kernel, q, k, v, scale, mask)


_Kernel: TypeAlias = Callable[..., int]


@functools.cache
def attention_kernel() -> _Kernel | None:
    """`bridge_attention`, if this process has it and its processor has vectors."""
    library, pointer = ctypes.CDLL(None), ctypes.c_void_p
    if not hasattr(library, "bridge_attention"):
        return None
    kernel = library.bridge_attention
    kernel.argtypes = [*[pointer] * 7, ctypes.c_float, pointer, pointer]
    nothing = _at(np.zeros(6, np.int64))
    return kernel if kernel(None, None, None, None, None, nothing, nothing, 0.0, None, None) else None


def _by_library(
    kernel: _Kernel, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """`attention` by `kernel`."""
    batch, heads, length, width = q.shape
    groups, total, size = v.shape[1:]
    given = mask if isinstance(mask, mx.array) else None
    if given is not None and given.shape[-1] != total:
        given = mx.broadcast_to(given, (*given.shape[:-1], total))
    if given is not None and given.dtype != mx.bool_:
        given = given.astype(mx.float32)
    compute(q, k, v, *([] if given is None else [given]))
    queries, keys, values = as_numpy(q), as_numpy(k), as_numpy(v)
    masks = None if given is None else np.broadcast_to(as_numpy(given), (batch, heads, length, total))
    spaced = (keys, values, keys if masks is None else masks)
    distances = np.array([each.strides[axis] // each.itemsize for each in spaced for axis in (1, 2)], np.int64)
    result = np.empty((batch, heads, length, size), np.float32)
    pieces = -(-length // max(2 * _ROWS, _SCRATCH * _KEYS // (heads * total * size)))
    for sequence, piece in product(range(batch), range(pieces)):
        begin, end = length * piece // pieces, length * (piece + 1) // pieces
        seen = total - length + end if mask == "causal" else total
        sizes = np.array((heads, groups, end - begin, seen, width, size, mask == "causal"), np.int32)
        chunks = -(-seen // _KEYS)
        scratch = np.empty(heads * (end - begin) * chunks * (size + 2) + chunks + _LANES, np.float32)
        rows, found = np.ascontiguousarray(queries[sequence, :, begin:end]), result[sequence, :, begin:end]
        own = None if masks is None else _at(masks[sequence, :, begin:end])
        boolean, added = (None, own) if masks is not None and masks.dtype == np.float32 else (own, None)
        written = found if pieces == 1 else np.empty(found.shape, np.float32)
        inputs = _at(rows), _at(keys[sequence]), _at(values[sequence])
        kernel(*inputs, boolean, added, _at(distances), _at(sizes), scale, _at(scratch), _at(written))
        if pieces > 1:
            found[:] = written
    return mx.array(result)


def as_numpy(array: mx.array) -> npt.NDArray[Any]:
    """A view, or a copy if its last axis does not lie in one piece."""
    found: Any = array
    view: npt.NDArray[Any] = np.asarray(found)
    return view if view.strides[-1] == view.itemsize else np.ascontiguousarray(view)


def _at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _vectors(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """`attention` with numpy's exponentials."""
    batch, heads, length, _ = q.shape
    groups, total = k.shape[1], k.shape[2]
    share = heads // groups
    together = share if length > _ROWS else _most_heads(share, length)
    queries = mx.reshape(q * scale, (batch, groups, share // together, together * length, -1))
    k, v = (mx.expand_dims(each, 2) for each in (k, v))
    scores = queries @ k.swapaxes(-1, -2)
    added = _added(mask, length, total)
    compute(scores, *([] if added is None else [added]))
    rows: Scores = np.asarray(scores, np.float32).reshape(batch, heads, length, total)
    masks = None if added is None else np.broadcast_to(np.asarray(added, np.float32), rows.shape)
    step, together = max(1, _BLOCK // total), max(1, _BLOCK // (total * length))
    for sequence, head in product(range(batch), range(0, heads, together)):
        own = sequence, slice(head, head + together)
        for begin in range(0, length, step):
            place = *own, slice(begin, begin + step)
            _normalise(rows[place], None if masks is None else masks[place], few=length <= _ROWS)
    return mx.reshape(_weighted(scores, v) if length <= _ROWS else scores @ v, (batch, heads, length, -1))


def _weighted(scores: mx.array, values: mx.array) -> mx.array:
    """(B, H', m, rows, T) @ (B, H', 1, T, size), chunk by chunk. A row is the sum of its chunks in their order, so that
    chunks of zeros behind it don't change it."""
    whole = scores.shape[-1] // _CHUNK
    if not whole:
        return scores @ values
    stop = whole * _CHUNK
    chunks = mx.moveaxis(mx.unflatten(scores[..., :stop], -1, (whole, _CHUNK)), 4, 2)
    total = (chunks @ mx.unflatten(values[..., :stop, :], -2, (whole, _CHUNK)).swapaxes(2, 3)).sum(axis=2)
    return total if stop == scores.shape[-1] else total + scores[..., stop:] @ values[..., stop:, :]


def _most_heads(share: int, length: int) -> int:
    """Of heads that share keys, as many as one product takes, so that a row has the bits that it has alone."""
    return max(count for count in range(1, share + 1) if share % count == 0 and count * length <= max(_ROWS, length))


def _added(mask: mx.array | str | None, length: int, total: int) -> mx.array | None:
    """What the mask adds to the scores; its shape can be broadcast to (B, H, L, T)."""
    if isinstance(mask, str):
        mask = mx.arange(total) <= mx.arange(total - length, total)[:, None]
    if mask is None or mask.dtype != mx.bool_:
        return mask
    return mx.where(mask, mx.array(0.0), mx.array(-mx.inf))


def _normalise(scores: Scores, shift: Scores | None, few: bool) -> None:
    """Softmax of each row of (..., T), after `shift` is added, in place. A row of -inf becomes NaN, as in MLX. `few`:
    of a forward whose rows must not depend on one another."""
    if shift is not None:
        scores += shift
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= _sums(scores) if few else scores.sum(axis=-1, keepdims=True)


def _sums(scores: Scores) -> Scores:
    """(..., 1): of each row of (..., T), in an order that zeros behind it don't change. A row has fewer scores where it
    is alone than where others follow it, and numpy's own order depends on their number."""
    *rows, total = scores.shape
    whole = np.zeros((*rows, -(-total // _SUMMED), _SUMMED), np.float32)
    whole.reshape(*rows, -1)[..., :total] = scores
    return np.cumsum(whole.sum(axis=-1), axis=-1)[..., -1:]
