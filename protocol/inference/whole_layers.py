"""On a Linux processor the library that multiplies for MLX computes whole layers of Llama's form. Knows no file.

Such a layer is some forty operations of MLX. Each costs more than what it computes of a few tokens, and most run on one
thread: together they take as long as the products. See `orchestrator/machine/blas/bridge.c`.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models import llama
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
"""In the order of `bridge_layers`."""
_LINE, _KEYS, _TOGETHER = 16, 256, 64
"""Numbers of a vector, keys of a partial sum and rows that attend at once in the library."""
_TOLERANCE = 1e-3


def compute_layers_whole(network: Any) -> None:
    """Let the layers of this mlx-lm model that have Llama's form be computed so, in forwards whose keys and values lie
    in a `FullAttentionCache`, of one sequence or of several: all of them in one call where the model is a Llama, and
    its head in another one."""
    if mx.default_device() != mx.Device(mx.cpu) or attention_kernel() is None:
        return
    forms, found = dict[tuple[Any, ...], _Form](), dict[int, _Layer]()
    for layer in modules_of(network):
        with suppress(AttributeError, TypeError, ValueError):
            own = _Layer(layer, forms)
            whole = _Layers([own])
            if whole.proved(layer):
                found[id(layer)] = own
                _call(layer, whole.instead_of_layer)
    for model in modules_of(network):
        with suppress(KeyError, ValueError):
            if type(model) is llama.LlamaModel:
                whole = _Model(model, _Layers([found[id(layer)] for layer in model.layers]))
                _call(model, whole)
                if type(network) is llama.Model:
                    _call(model.norm, _Norm(model.norm))
                    _call(network, _Network(network, whole))


def _call(module: nn.Module, whole: Callable[..., mx.array | None]) -> None:
    """From now on call `whole`, and the module where that gives None."""
    kind: Any = type(module)

    def call(self: Any, *given: Any, **others: Any) -> mx.array:
        found = whole(*given, **others)
        return kind.__call__(self, *given, **others) if found is None else found

    # Others look a layer's code up by the name of its module.
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Layer:
    """Where one layer's weights lie."""

    def __init__(self, layer: Any, forms: "dict[tuple[Any, ...], _Form]") -> None:
        """`forms`: of all layers. Raises an error for a layer of another form."""
        attention, rope = layer.self_attn, layer.self_attn.rope
        modules: list[Any] = [reduce(getattr, name.split("."), layer) for name in _WEIGHTS]
        simple = all(isinstance(each, nn.Linear | nn.RMSNorm) and len(each) == 1 for each in modules)
        if not simple or not isinstance(rope, nn.RoPE):
            raise TypeError("it has other parts")
        weights = self._held = [as_numpy(each.weight) for each in modules]
        (wide, hidden), narrow, inner, groups = weights[1].shape, len(weights[2]), len(weights[6]), attention.n_kv_heads
        size = narrow // groups
        lines = not any(each % _LINE for each in (hidden, size, inner))
        if not lines or rope.traditional or rope.dims != size or any(each.dtype != np.float32 for each in weights):
            raise ValueError("it has other sizes")
        self.places = [each.ctypes.data for each in weights]
        self.numbers = modules[0].eps, modules[5].eps, attention.scale
        key = hidden, wide // size, groups, size, inner, rope.base, rope.scale
        self.form = forms.setdefault(key, _Form(*key))


class _Layers:
    """Layers behind one another."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        """Raises ValueError for layers of several forms."""
        (self._form,) = {layer.form for layer in layers}
        places = np.array([layer.places for layer in layers])
        numbers = np.array([layer.numbers for layer in layers], np.float32)
        self._held = layers, places, numbers
        self._given = places.ctypes.data, numbers.ctypes.data, self._form.sizes.ctypes.data
        self._kernel = ctypes.CDLL(None).bridge_layers
        self._kernel.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2]

    def proved(self, layer: Any) -> bool:
        """Whether this one layer computes what `layer` computes."""
        cache = FullAttentionCache(KVCache())
        cache.prepare(ForwardShape(0, 3, mask="causal"))
        x = mx.random.normal((1, 3, int(self._form.sizes[0])), key=mx.random.key(0))
        found = self.instead_of_layer(x, "causal", cache)
        return found is not None and bool(mx.allclose(found, layer(x, "causal", None), _TOLERANCE, _TOLERANCE).item())

    def instead_of_layer(self, x: mx.array, mask: MaskKind = None, cache: Any = None, **others: Any) -> mx.array | None:
        """None for rows, masks or caches of another form."""
        forward = None if others or x.dtype != mx.float32 else self(x, mask, (cache,))
        if forward is None:
            return None
        forward.last = mx.array(forward.rows)
        return forward.last

    def __call__(self, x: mx.array | _Floats, mask: MaskKind, caches: Sequence[Any]) -> "_Forward | None":
        """The same, in its `rows`. `x`: (1, rows, hidden)."""
        layers: list[Sequence[Any]] = [each.parts if isinstance(each, JointCache) else (each,) for each in caches]
        if any(type(part) is not FullAttentionCache or not part.plain for parts in layers for part in parts):
            return None
        forward = self._form.forward(x.shape, mask, layers[0], caches[0].offset)
        if forward is None:
            return None
        table = list[list[int]]()
        for parts in layers:
            for part, rows in zip(parts, forward.table, strict=True):
                keys, values = part.room(self._form.row)
                try:
                    table.append([_address(keys), _address(values), keys.shape[2] * keys.shape[3], *rows])
                except TypeError:
                    return None
        if x is not forward.last:
            forward.rows[:] = as_numpy(x) if isinstance(x, mx.array) else x
        every = np.array(table)
        own = every.ctypes.data, forward.scratch.ctypes.data, len(layers), len(layers[0])
        self._kernel(*self._given, *forward.given, *own)
        forward.last = None
        return forward


class _Model:
    """What a Llama computes before its head, its layers in one call."""

    def __init__(self, model: Any, layers: _Layers) -> None:
        """Raises an error for an embedding of another form."""
        self._model, self._layers, self._calls = model, layers, _calls(model)
        self._embedding = as_numpy(model.embed_tokens.weight)
        if len(model.embed_tokens) > 1 or self._embedding.dtype != np.float32:
            raise ValueError("it has other parts")

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array | None:
        found = self.forward(inputs, cache, input_embeddings)
        return None if found is None else self._model.norm(mx.array(found.rows))

    def forward(self, inputs: mx.array, cache: Any, input_embeddings: mx.array | None) -> "_Forward | None":
        """None where layers are observed, and for forwards that `_Layers` does not compute."""
        ours = isinstance(cache and cache[0], FullAttentionCache | JointCache)
        if not ours or input_embeddings is not None or _calls(self._model) != self._calls:
            return None
        return self._layers(self._embedding[as_numpy(inputs)], cache[0].make_mask(inputs.shape[1]), cache)


class _Norm:
    """A final norm by the library, so that its rows have the bits that they have in `_Network`."""

    def __init__(self, norm: Any) -> None:
        """Raises ValueError for one of another form."""
        self._weights, self._eps, self._kernel = as_numpy(norm.weight), norm.eps, ctypes.CDLL(None).bridge_norm
        if not isinstance(norm, nn.RMSNorm) or self._weights.dtype != np.float32:
            raise ValueError("it has another form")
        self._kernel.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, ctypes.c_float, ctypes.c_void_p]

    def __call__(self, x: mx.array) -> mx.array | None:
        """None for rows of another form."""
        if x.dtype != mx.float32:
            return None
        rows = np.ascontiguousarray(as_numpy(x))
        found, width = np.empty_like(rows), rows.shape[-1]
        given = rows.ctypes.data, self._weights.ctypes.data, rows.size // width, width
        self._kernel(*given, self._eps, found.ctypes.data)
        return mx.array(found)


class _Network:
    """A Llama's logits: its final norm and the matrices of its head in one call. They are (rows, V), without a batch's
    axis: to take it away is an operation of MLX, which one would wait for."""

    def __init__(self, network: Any, model: _Model) -> None:
        self._network, self._model, self._norm = network, model, network.model.norm
        self._weights, self._call = as_numpy(self._norm.weight), type(self._norm).__call__
        self._kernel = ctypes.CDLL(None).bridge_head
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._kernel.argtypes = [
            pointer,
            ctypes.c_float,
            *[pointer] * 2,
            number,
            pointer,
            *[number] * 2,
            *[pointer] * 2,
        ]

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array | None:
        """None where the final norm is observed, for logits that may not be read, and where `_Model` gives None."""
        if not cache or not _is_read(cache[0]) or type(self._norm).__call__ is not self._call:
            return None
        head = self._head()
        if head is None:
            return None
        forward = self._model.forward(inputs, cache, input_embeddings)
        if forward is None:
            return None
        (_, rows, width), (matrices, columns) = forward.rows.shape, head
        logits = np.empty((rows, int(columns.sum())), np.float32)
        places = np.array([each.ctypes.data for each in matrices])
        given = self._weights.ctypes.data, self._norm.eps, places.ctypes.data, columns.ctypes.data, len(places)
        room = forward.scratch.ctypes.data, logits.ctypes.data
        self._kernel(*given, forward.rows.ctypes.data, rows, width, *room)
        return mx.array(logits)

    def _head(self) -> tuple[list[_Floats], npt.NDArray[np.int64]] | None:
        """The matrices, whose logits follow one another, and how many each has; None for a head of another form."""
        network = self._network
        head = network.model.embed_tokens if network.args.tie_word_embeddings else network.lm_head
        parts = getattr(head, "parts", [head])
        if not all(isinstance(part, nn.Embedding | nn.Linear) and len(part) == 1 for part in parts):
            return None
        if any(part.weight.dtype != mx.float32 for part in parts):
            return None
        matrices = [as_numpy(part.weight) for part in parts]
        if not all(each.flags.c_contiguous for each in matrices):
            return None
        return matrices, np.array([len(each) for each in matrices])


def _is_read(cache: Any) -> bool:
    """Whether the logits of its forward are."""
    parts = cache.parts if isinstance(cache, JointCache) else [cache]
    return isinstance(parts[0], FullAttentionCache) and parts[0].forward.read


def _address(array: Any) -> int:
    """Of its numbers. Raises TypeError where they don't lie in one piece. It takes a third of the time of numpy's view,
    and each forward asks for those of all layers."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def _calls(model: Any) -> list[Any]:
    """An observed layer has a call of its own."""
    return [type(layer).__call__ for layer in model.layers]


class _Forward:
    """What all layers of one form take in a forward, in memory that they share."""

    last: mx.array | None = None
    """What the last layer gave, which `rows` are."""

    def __init__(self, rows: _Floats, angles: _Floats, table: list[list[int]], held: list[Any], scratch: int) -> None:
        """`table`: of each sequence, the end of `Rows` in bridge.c. `held`: arrays that it names. `scratch`: its
        numbers."""
        self.rows, self.table, self.scratch = rows, table, np.empty(scratch, np.float32)
        self._held = angles, held
        self.given = rows.ctypes.data, angles.ctypes.data, rows.shape[1]


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
        self, shape: Sequence[int], mask: MaskKind, parts: Sequence[Any], offset: int | TreePositions
    ) -> _Forward | None:
        key = (mask, *(part.forward for part in parts))
        if len(key) != len(self._key) or any(own is not other for own, other in zip(key, self._key, strict=True)):
            self._key, self._forward = key, self._begun(shape, mask, parts, offset)
        return self._forward

    def _begun(
        self, shape: Sequence[int], mask: MaskKind, parts: Sequence[Any], offset: int | TreePositions
    ) -> _Forward | None:
        batch, rows, hidden = shape
        if batch != 1 or sum(part.forward.length for part in parts) != rows:
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
            table.append([begin, length, seen])
            sums = max(sums, min(length, _TOGETHER) * -(-end // _KEYS) * heads * (size + 2) + end)
        a_row, together = hidden + (heads + 2 * groups) * size + 2 * inner, _TOGETHER * 2 * heads * size
        scratch = rows * a_row + together + sums + 10 * _LINE
        return _Forward(np.empty(shape, np.float32), self._turns(offset, rows), table, held, scratch)

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
