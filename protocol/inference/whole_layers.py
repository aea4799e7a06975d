"""On a Linux processor the library that multiplies for MLX computes whole layers of a few tokens. Knows no file.

A layer of Llama's form is some forty operations of MLX there. Each costs more than what it computes of a few numbers,
and most run on one thread: beside the products they take as long again. See `orchestrator/machine/blas/bridge.c`.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models.cache import KVCache

from protocol.inference.joint_forward import JointCache
from protocol.inference.layer_cache import ForwardShape, MaskKind, RowForm, TreePositions
from protocol.inference.layer_caches.full_attention import FullAttentionCache
from protocol.inference.observed_modules import modules_of
from protocol.inference.processor_attention import MOST_ROWS, ROPE, as_numpy, kernel_named

_Floats: TypeAlias = npt.NDArray[np.float32]
_NORMS = ("input_layernorm", "post_attention_layernorm")
_WEIGHTS = (
    *(_NORMS[0], "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *(_NORMS[1], "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""In the order of `bridge_layer`."""
_LINE = 16
_KEYS = 256
"""Numbers of a vector and keys of a partial sum in the library."""
_ANGLES = 256
"""Positions whose angles are computed together."""
_PROVED = ForwardShape(0, 3, mask="causal")
_TOLERANCE = 1e-3


def compute_layers_whole(network: Any) -> None:
    """Let the layers of this mlx-lm model that have Llama's form be computed so, in forwards of up to `MOST_ROWS`
    tokens whose keys and values lie in a `FullAttentionCache`, of one sequence or of several."""
    kernel = kernel_named("bridge_layer")
    if kernel is None or sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu):
        return
    kernel.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int, *[ctypes.c_void_p] * 3]
    angles: dict[tuple[object, ...], _Angles] = {}
    for layer in modules_of(network):
        try:
            whole = _Layer(layer, kernel, angles)
        except (AttributeError, TypeError, ValueError):
            continue
        if whole.proved(layer):
            _replace(layer, whole)


def _replace(layer: nn.Module, whole: "_Layer") -> None:
    kind: Any = type(layer)

    def call(self: Any, x: mx.array, mask: MaskKind = None, cache: Any = None) -> mx.array:
        parts = whole.parts(x, mask, cache)
        return kind.__call__(self, x, mask, cache) if parts is None else whole(x, cache.offset, *parts)

    # Others look a layer's code up by the name of its module.
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Layer:
    def __init__(self, layer: Any, kernel: Callable[..., int], angles: "dict[tuple[object, ...], _Angles]") -> None:
        """`angles`: of the ropes of all layers. Raises an error for a layer of another form."""
        self._kernel = kernel
        attention, rope = layer.self_attn, layer.self_attn.rope
        held: list[_Floats] = []
        for name in _WEIGHTS:
            module: Any = reduce(getattr, name.split("."), layer)
            if not isinstance(module, nn.Linear | nn.RMSNorm) or len(module) > 1 or module.weight.dtype != mx.float32:
                raise TypeError(name)
            held.append(as_numpy(module.weight))
        (wide, hidden), (narrow, _), inner = held[1].shape, held[2].shape, len(held[6])
        self._form = RowForm(attention.n_kv_heads, narrow // attention.n_kv_heads, mx.float32)
        size = self._form.size
        if any(each % _LINE for each in (hidden, size, inner)) or (rope.dims, rope.traditional) != (size, False):
            raise ValueError("it does not consist of whole lines")
        self._weights, self._places = held, np.array([each.ctypes.data for each in held])
        self._numbers = np.array([*(getattr(layer, name).eps for name in _NORMS), attention.scale], np.float32)
        self._sizes = np.array((hidden, wide // size, self._form.heads, size, inner), np.int32)
        self._given = [each.ctypes.data for each in (self._places, self._numbers, self._sizes)]
        self._row = hidden + 3 * wide + 2 * narrow + 2 * inner
        """Numbers that a row takes while it is computed, and each of its partial sums."""
        self._sum = wide // size * (size + 2)
        key = rope.dims, rope.base, rope.scale
        self._angles = angles.setdefault(key, _Angles(*key))

    def proved(self, layer: Any) -> bool:
        """Whether it computes what the layer computes."""
        shape, cache = (1, _PROVED.length, int(self._sizes[0])), FullAttentionCache(KVCache())
        x = mx.random.normal(shape, key=mx.random.key(0))
        cache.prepare(_PROVED)
        try:
            right = layer(x, "causal", None)
        except (TypeError, ValueError, AttributeError):
            return False
        found = self(x, 0, [cache], [None])
        return bool(mx.allclose(found, right, _TOLERANCE, _TOLERANCE).item())

    def parts(
        self, x: mx.array, mask: MaskKind, cache: Any
    ) -> "tuple[Sequence[FullAttentionCache], list[npt.NDArray[np.bool_] | None]] | None":
        """The cache of each sequence and what its rows see, None where that is what is before them. None in place of
        all: another form of them."""
        parts: Sequence[Any] = cache.parts if isinstance(cache, JointCache) else [cache]
        if x.shape[1] > MOST_ROWS or x.dtype != mx.float32 or any(not _fits(part) for part in parts):
            return None
        given = [part.make_mask(part.forward.length) for part in parts] if len(parts) > 1 else [mask]
        masks = [as_numpy(each) if isinstance(each, mx.array) else None for each in given]
        if any(seen is not None and seen.dtype != np.bool_ for seen in masks):
            return None
        return parts, masks

    def __call__(
        self,
        x: mx.array,
        offset: int | TreePositions,
        parts: Sequence[FullAttentionCache],
        masks: Sequence[npt.NDArray[np.bool_] | None],
    ) -> mx.array:
        table: list[int] = []
        held: list[object] = []
        rows, sums = x.shape[1], 0
        for part, mask in zip(parts, masks, strict=True):
            begin, length = part.forward.begin, part.forward.length
            keys, values = map(as_numpy, part.room(self._form))
            seen = 0 if mask is None else mask.ctypes.data
            table += [keys.ctypes.data, values.ctypes.data, keys.strides[1] // 4, begin, length, seen]
            sums = max(sums, length * -(-(begin + length) // _KEYS) * self._sum + begin + length)
            held += keys, values
        places, angles, given = np.array(table), self._angles.of(offset, rows), as_numpy(x)
        scratch, out = np.empty(rows * self._row + sums + 16 * _LINE, np.float32), np.empty(x.shape, np.float32)
        inputs = given.ctypes.data, angles.ctypes.data, rows, places.ctypes.data
        self._kernel(*self._given, *inputs, scratch.ctypes.data, out.ctypes.data)
        return mx.array(out)


def _fits(cache: Any) -> bool:
    return type(cache) is FullAttentionCache and cache.plain


class _Angles:
    """Cosines and sines of a rope's positions, as MLX computes them."""

    def __init__(self, dims: int, base: float, scale: float) -> None:
        self._base, self._scale = base, scale
        self._found = np.empty((0, dims), np.float32)
        self._last: tuple[mx.array | None, _Floats] = None, self._found

    def of(self, offset: int | TreePositions, rows: int) -> _Floats:
        """(rows, dims)."""
        if isinstance(offset, int):
            self._reach(offset + rows)
            return self._found[offset : offset + rows]
        if offset.positions is not self._last[0]:
            positions = as_numpy(offset.positions)
            self._reach(int(positions.max()) + 1)
            self._last = offset.positions, self._found[positions]
        return self._last[1]

    def _reach(self, positions: int) -> None:
        while len(self._found) < positions:
            begin, dims = self._found.shape
            ones = mx.broadcast_to(mx.arange(dims) < dims // 2, (1, 1, _ANGLES, dims)).astype(mx.float32)
            more = ROPE(ones, dims, traditional=False, base=self._base, scale=self._scale, offset=begin)
            self._found = np.concatenate([self._found, as_numpy(more)[0, 0]])
