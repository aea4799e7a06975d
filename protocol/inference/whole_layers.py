"""On a Linux processor the library that multiplies for MLX computes whole layers of Llama's form. Knows no file.

Such a layer is some forty operations of MLX. Each costs more than what it computes of a few tokens, and most run on one
thread: together they take as long as the products. See `orchestrator/machine/blas/bridge.c`.
"""

import ctypes
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
from protocol.inference.processor_attention import as_numpy, attention_kernel

_Floats: TypeAlias = npt.NDArray[np.float32]
_WEIGHTS = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""In the order of `bridge_layer`."""
_LINE, _KEYS, _TOGETHER = 16, 256, 64
"""Numbers of a vector, keys of a partial sum and rows that attend at once in the library."""
_PROVED = ForwardShape(0, 3, mask="causal")
_TOLERANCE = 1e-3


def compute_layers_whole(network: Any) -> None:
    """Let the layers of this mlx-lm model that have Llama's form be computed so, in forwards whose keys and values lie
    in a `FullAttentionCache`, of one sequence or of several."""
    if mx.default_device() != mx.Device(mx.cpu) or attention_kernel() is None:
        return
    kernel = ctypes.CDLL(None).bridge_layer
    kernel.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int, *[ctypes.c_void_p] * 3]
    angles: dict[tuple[object, ...], _Angles] = {}
    for layer in modules_of(network):
        try:
            whole = _Layer(layer, kernel, angles)
            if not whole.proved(layer):
                continue
        except (AttributeError, TypeError, ValueError):
            continue
        _replace(layer, whole)


def _replace(layer: nn.Module, whole: "_Layer") -> None:
    kind: Any = type(layer)

    def call(self: Any, x: mx.array, mask: MaskKind = None, cache: Any = None, **others: Any) -> mx.array:
        found = None if others else whole(x, mask, cache)
        return kind.__call__(self, x, mask, cache, **others) if found is None else found

    # Others look a layer's code up by the name of its module.
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Layer:
    def __init__(self, layer: Any, kernel: Callable[..., None], angles: "dict[tuple[object, ...], _Angles]") -> None:
        """`angles`: of the ropes of all layers. Raises an error for a layer of another form."""
        attention, rope = layer.self_attn, layer.self_attn.rope
        modules: list[Any] = [reduce(getattr, name.split("."), layer) for name in _WEIGHTS]
        simple = all(isinstance(each, nn.Linear | nn.RMSNorm) and len(each) == 1 for each in modules)
        if not simple or not isinstance(rope, nn.RoPE):
            raise TypeError("it has other parts")
        weights: list[_Floats] = [as_numpy(each.weight) for each in modules]
        (wide, hidden), narrow, inner = weights[1].shape, len(weights[2]), len(weights[6])
        self._form = RowForm(attention.n_kv_heads, narrow // attention.n_kv_heads, mx.float32)
        size = self._form.size
        lines = not any(each % _LINE for each in (hidden, size, inner))
        if not lines or rope.traditional or rope.dims != size or any(each.dtype != np.float32 for each in weights):
            raise ValueError("it has other sizes")
        places = np.array([each.ctypes.data for each in weights])
        numbers = np.array([modules[0].eps, modules[5].eps, attention.scale], np.float32)
        sizes = np.array((hidden, wide // size, self._form.heads, size, inner), np.int32)
        self._kernel, self._held, self._hidden = kernel, (weights, places, numbers, sizes), int(hidden)
        self._given = places.ctypes.data, numbers.ctypes.data, sizes.ctypes.data
        self._row, self._together = hidden + wide + 2 * narrow + 2 * inner, _TOGETHER * 2 * wide + 10 * _LINE
        """Numbers that a row takes while it is computed, and all rows together."""
        self._sum = wide // size * (size + 2)
        key = rope.dims, rope.base, rope.scale
        self._angles = angles.setdefault(key, _Angles(*key))

    def proved(self, layer: Any) -> bool:
        """Whether it computes what the layer computes."""
        cache = FullAttentionCache(KVCache())
        cache.prepare(_PROVED)
        x = mx.random.normal((1, _PROVED.length, self._hidden), key=mx.random.key(0))
        found = self(x, "causal", cache)
        return found is not None and bool(mx.allclose(found, layer(x, "causal", None), _TOLERANCE, _TOLERANCE).item())

    def __call__(self, x: mx.array, mask: MaskKind, cache: Any) -> mx.array | None:
        """None for rows, masks or caches of another form."""
        joint = isinstance(cache, JointCache)
        parts: Sequence[Any] = cache.parts if joint else [cache]
        if x.dtype != mx.float32 or any(type(part) is not FullAttentionCache or not part.plain for part in parts):
            return None
        rows, sums, places = x.shape[1], 0, list[int]()
        if x.shape[0] != 1 or sum(part.forward.length for part in parts) != rows:
            return None
        held: list[npt.NDArray[Any]] = []
        for part in parts:
            begin, length = part.forward.begin, part.forward.length
            given, end = part.make_mask(length) if joint else mask, begin + length
            found = [as_numpy(array) for array in part.room(self._form)]
            places += [*(array.ctypes.data for array in found), found[0].strides[1] // 4, begin, length, 0]
            if isinstance(given, mx.array):
                found.append(as_numpy(given))
                places[-1] = found[-1].ctypes.data
                if found[-1].dtype != np.bool_ or found[-1].shape != (length, end):
                    return None
            if any(not array.flags.c_contiguous for array in found):
                return None
            sums = max(sums, min(length, _TOGETHER) * -(-end // _KEYS) * self._sum + end)
            held += found
        table, angles, given = np.array(places), self._angles.of(cache.offset, rows), as_numpy(x)
        scratch = np.empty(rows * self._row + self._together + sums, np.float32)
        out = np.empty(x.shape, np.float32)
        inputs = given.ctypes.data, angles.ctypes.data, rows, table.ctypes.data
        self._kernel(*self._given, *inputs, scratch.ctypes.data, out.ctypes.data)
        return mx.array(out)


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
        """In steps, since most forwards go on by a few positions."""
        begin, dims = self._found.shape
        if begin < positions:
            count = -(-positions // _KEYS) * _KEYS - begin
            # A pair (1, 0) becomes a cosine and a sine.
            pairs = mx.broadcast_to(mx.arange(dims) < dims // 2, (1, 1, count, dims)).astype(mx.float32)
            turned = mx.fast.rope(pairs, dims, traditional=False, base=self._base, scale=self._scale, offset=begin)
            self._found = np.concatenate([self._found, as_numpy(turned)[0, 0]])
