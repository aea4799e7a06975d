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
_TOLERANCE = 1e-3


def compute_layers_whole(network: Any) -> None:
    """Let the layers of this mlx-lm model that have Llama's form be computed so, in forwards whose keys and values lie
    in a `FullAttentionCache`, of one sequence or of several."""
    if mx.default_device() != mx.Device(mx.cpu) or attention_kernel() is None:
        return
    kernel = ctypes.CDLL(None).bridge_layer
    kernel.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int, *[ctypes.c_void_p] * 2]
    forms: dict[tuple[Any, ...], _Form] = {}
    for layer in modules_of(network):
        try:
            whole = _Layer(layer, kernel, forms)
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
    def __init__(self, layer: Any, kernel: Callable[..., None], forms: "dict[tuple[Any, ...], _Form]") -> None:
        """`forms`: of all layers. Raises an error for a layer of another form."""
        attention, rope = layer.self_attn, layer.self_attn.rope
        modules: list[Any] = [reduce(getattr, name.split("."), layer) for name in _WEIGHTS]
        simple = all(isinstance(each, nn.Linear | nn.RMSNorm) and len(each) == 1 for each in modules)
        if not simple or not isinstance(rope, nn.RoPE):
            raise TypeError("it has other parts")
        weights: list[_Floats] = [as_numpy(each.weight) for each in modules]
        (wide, hidden), narrow, inner, groups = weights[1].shape, len(weights[2]), len(weights[6]), attention.n_kv_heads
        size = narrow // groups
        lines = not any(each % _LINE for each in (hidden, size, inner))
        if not lines or rope.traditional or rope.dims != size or any(each.dtype != np.float32 for each in weights):
            raise ValueError("it has other sizes")
        places = np.array([each.ctypes.data for each in weights])
        numbers = np.array([modules[0].eps, modules[5].eps, attention.scale], np.float32)
        key = hidden, wide // size, groups, size, inner, rope.base, rope.scale
        self._form = forms.setdefault(key, _Form(*key))
        self._kernel, self._held = kernel, (weights, places, numbers)
        self._given = places.ctypes.data, numbers.ctypes.data, self._form.sizes.ctypes.data

    def proved(self, layer: Any) -> bool:
        """Whether it computes what the layer computes."""
        cache = FullAttentionCache(KVCache())
        cache.prepare(ForwardShape(0, 3, mask="causal"))
        x = mx.random.normal((1, 3, int(self._form.sizes[0])), key=mx.random.key(0))
        found = self(x, "causal", cache)
        return found is not None and bool(mx.allclose(found, layer(x, "causal", None), _TOLERANCE, _TOLERANCE).item())

    def __call__(self, x: mx.array, mask: MaskKind, cache: Any) -> mx.array | None:
        """None for rows, masks or caches of another form."""
        parts: Sequence[Any] = cache.parts if isinstance(cache, JointCache) else (cache,)
        if any(type(part) is not FullAttentionCache or not part.plain for part in parts):
            return None
        forward = self._form.forward(x, mask, parts, cache.offset)
        if forward is None:
            return None
        for row, part in zip(forward.table, parts, strict=True):
            keys, values = map(as_numpy, part.room(self._form.row))
            if not (keys.flags.c_contiguous and values.flags.c_contiguous):
                return None
            row[:3] = keys.ctypes.data, values.ctypes.data, keys.strides[1] // keys.itemsize
        if x is not forward.last:
            forward.rows[:] = as_numpy(x)
        self._kernel(*self._given, *forward.given)
        forward.last = mx.array(forward.rows)
        return forward.last


class _Forward:
    """What all layers of one form take in a forward, in memory that they share."""

    last: mx.array | None = None
    """What the last layer gave, which `rows` are."""

    def __init__(self, rows: _Floats, angles: _Floats, table: list[list[int]], held: list[Any], scratch: int) -> None:
        """`table`: of each sequence, as `Rows` in bridge.c. `held`: arrays that it names. `scratch`: its numbers."""
        self.rows, self.table = rows, np.array(table)
        self._held = angles, held, np.empty(scratch, np.float32)
        x, turns, parts, room = (array.ctypes.data for array in (rows, angles, self.table, self._held[2]))
        self.given = x, turns, rows.shape[1], parts, room


class _Form:
    """Sizes and rope that layers have in common, and the forward in progress."""

    def __init__(self, hidden: int, heads: int, groups: int, size: int, inner: int, base: float, scale: float) -> None:
        self.sizes = np.array((hidden, heads, groups, size, inner), np.int32)
        self.row = RowForm(groups, size, mx.float32)
        self._base, self._scale = base, scale
        self._angles = np.empty((0, size), np.float32)
        """By position: cosines and sines as MLX computes them."""
        self._key: tuple[Any, ...] = ()
        self._forward: _Forward | None = None

    def forward(
        self, x: mx.array, mask: MaskKind, parts: Sequence[FullAttentionCache], offset: int | TreePositions
    ) -> _Forward | None:
        key = (mask, *(part.forward for part in parts))
        if len(key) != len(self._key) or any(own is not other for own, other in zip(key, self._key, strict=True)):
            self._key, self._forward = key, self._begun(x, mask, parts, offset)
        return self._forward

    def _begun(
        self, x: mx.array, mask: MaskKind, parts: Sequence[FullAttentionCache], offset: int | TreePositions
    ) -> _Forward | None:
        batch, rows, hidden = x.shape
        if batch != 1 or x.dtype != mx.float32 or sum(part.forward.length for part in parts) != rows:
            return None
        _, heads, groups, size, inner = self.sizes.tolist()
        table, held, sums = list[list[int]](), list[Any](), 0
        for part in parts:
            begin, length = part.forward.begin, part.forward.length
            given, end, seen = part.make_mask(length) if mask is None else mask, begin + length, 0
            if isinstance(given, mx.array):
                held.append(np.ascontiguousarray(as_numpy(given)))
                seen = held[-1].ctypes.data
                if held[-1].dtype != np.bool_ or held[-1].shape != (length, end):
                    return None
            table.append([0, 0, 0, begin, length, seen])
            sums = max(sums, min(length, _TOGETHER) * -(-end // _KEYS) * heads * (size + 2) + end)
        a_row, together = hidden + (heads + 2 * groups) * size + 2 * inner, _TOGETHER * 2 * heads * size
        scratch = rows * a_row + together + sums + 10 * _LINE
        return _Forward(np.empty(x.shape, np.float32), self._turns(offset, rows), table, held, scratch)

    def _turns(self, offset: int | TreePositions, rows: int) -> _Floats:
        """(rows, size)."""
        positions = np.arange(offset, offset + rows) if isinstance(offset, int) else as_numpy(offset.positions)
        begin, size = self._angles.shape
        count = -(-(int(positions.max()) + 1) // _KEYS) * _KEYS - begin
        if count > 0:
            # A pair (1, 0) becomes a cosine and a sine.
            pairs = mx.broadcast_to(mx.arange(size) < size // 2, (1, 1, count, size)).astype(mx.float32)
            turned = mx.fast.rope(pairs, size, traditional=False, base=self._base, scale=self._scale, offset=begin)
            self._angles = np.concatenate([self._angles, as_numpy(turned)[0, 0]])
        return self._angles[positions]
