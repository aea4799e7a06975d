"""Each MIL operation in MLX. Knows no files and no order of execution.

A float operation accepts any float type; the executor decides where to round. coremltools' `mil/ops/defs` defines the
operations, and the tests compare with it.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from draft_worker.coreml.package import Half

OperationFunction: TypeAlias = Callable[..., Any]
"""Takes mx.arrays in the order of `OperationRule.tensors`, None where one is absent. Returns an array or a list."""
OperationAttributes: TypeAlias = Mapping[str, Any]
"""Constant parameters, as numpy values or text."""


class OperationRule(NamedTuple):
    """The implementation of one operation."""

    tensors: tuple[str, ...]
    """Parameters that are tensors at run time. A parameter with several tensors gives several arrays."""
    bind: Callable[[OperationAttributes], OperationFunction]
    moves: bool = False
    """Whether the operation only moves numbers. Then its result is not rounded."""


def _ints(value: Any) -> list[int]:
    return [int(number) for number in np.asarray(value).reshape(-1)]


def _pointwise(function: OperationFunction) -> Callable[[OperationAttributes], OperationFunction]:
    return lambda _: function


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu(settings: OperationAttributes) -> OperationFunction:
    if str(settings.get("mode", "EXACT")) != "TANH_APPROXIMATION":
        raise ValueError("only gelu in its approximation by tanh is supported")
    return nn.gelu_approx


def _softmax(settings: OperationAttributes) -> OperationFunction:
    axis = int(settings["axis"])
    return lambda x: mx.softmax(x, axis)


def _conv(settings: OperationAttributes) -> OperationFunction:
    """A 1x1 convolution as the product of mlx-lm's linear layer, so that both round alike."""
    if int(settings.get("groups", 1)) != 1 or str(settings.get("pad_type", "valid")) != "valid":
        raise ValueError("only ungrouped convolutions without padding are supported")
    if any(step != 1 for name in ("strides", "dilations") for step in _ints(settings.get(name, 1))):
        raise ValueError("only convolutions with strides and dilations of 1 are supported")

    def run(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        batch, channels, height, width = x.shape
        columns = x.reshape(batch, channels, height * width).swapaxes(1, 2)
        product = columns @ weight.reshape(weight.shape[0], channels).T
        product = product if bias is None else product + bias
        return product.swapaxes(1, 2).reshape(batch, -1, height, width)

    return run


def _matmul(settings: OperationAttributes) -> OperationFunction:
    transpose_x, transpose_y = (bool(settings.get(name, False)) for name in ("transpose_x", "transpose_y"))

    def run(x: mx.array, y: mx.array) -> mx.array:
        return (x.swapaxes(-1, -2) if transpose_x else x) @ (y.swapaxes(-1, -2) if transpose_y else y)

    return run


def _layer_norm(settings: OperationAttributes) -> OperationFunction:
    axes, epsilon = _ints(settings["axes"]), float(settings.get("epsilon", 1e-5))
    if "gamma" in settings or "beta" in settings:
        raise ValueError("only layer_norm without gamma and beta is supported")

    def run(x: mx.array) -> mx.array:
        centred = x - mx.mean(x, axes, keepdims=True)
        return centred * mx.rsqrt(mx.mean(mx.square(centred), axes, keepdims=True) + epsilon)

    return run


def _reshape(settings: OperationAttributes) -> OperationFunction:
    shape = _ints(settings["shape"])
    return lambda x: x.reshape(shape)


def _transpose(settings: OperationAttributes) -> OperationFunction:
    order = _ints(settings["perm"])
    return lambda x: x.transpose(order)


def _split(settings: OperationAttributes) -> OperationFunction:
    axis, parts = int(settings["axis"]), settings.get("num_splits")
    if parts is None:
        raise ValueError("only split into equal parts is supported")
    return lambda x: mx.split(x, int(parts), axis)


def _concat(settings: OperationAttributes) -> OperationFunction:
    axis = int(settings["axis"])
    if bool(settings.get("interleave", False)):
        raise ValueError("only concat without interleave is supported")
    return lambda *values: mx.concatenate(list(values), axis)


def _slice_by_size(settings: OperationAttributes) -> OperationFunction:
    spans = zip(_ints(settings["begin"]), _ints(settings["size"]), strict=True)
    where = tuple(slice(begin, None if size == -1 else begin + size) for begin, size in spans)
    return lambda x: x[where]


def _reduce_sum(settings: OperationAttributes) -> OperationFunction:
    axes, kept = _ints(settings["axes"]), bool(settings.get("keep_dims", False))
    return lambda x: mx.sum(x, axes, keepdims=kept)


OPERATIONS: dict[str, OperationRule] = {
    "add": OperationRule(("x", "y"), _pointwise(operator.add)),
    "mul": OperationRule(("x", "y"), _pointwise(operator.mul)),
    "silu": OperationRule(("x",), _pointwise(_silu)),
    "gelu": OperationRule(("x",), _gelu),
    "tanh": OperationRule(("x",), _pointwise(mx.tanh)),
    "real_div": OperationRule(("x", "y"), _pointwise(operator.truediv)),
    "maximum": OperationRule(("x", "y"), _pointwise(mx.maximum)),
    "minimum": OperationRule(("x", "y"), _pointwise(mx.minimum)),
    "softmax": OperationRule(("x",), _softmax),
    "layer_norm": OperationRule(("x",), _layer_norm),
    "conv": OperationRule(("x", "weight", "bias"), _conv),
    "matmul": OperationRule(("x", "y"), _matmul),
    "reshape": OperationRule(("x",), _reshape, moves=True),
    "transpose": OperationRule(("x",), _transpose, moves=True),
    "split": OperationRule(("x",), _split, moves=True),
    "concat": OperationRule(("values",), _concat, moves=True),
    "slice_by_size": OperationRule(("x",), _slice_by_size, moves=True),
    "reduce_sum": OperationRule(("x",), _reduce_sum),
    "identity": OperationRule(("x",), _pointwise(lambda x: x), moves=True),
}


def shift_and_scale(settings: OperationAttributes) -> Half:
    """constexpr_blockwise_shift_scale with a scale a channel: scale * data, in the scale's type."""
    return settings["data"].astype(settings["scale"].dtype) * settings["scale"]


def look_up(settings: OperationAttributes) -> Half:
    """constexpr_lut_to_dense with a table a channel: each index replaced by its entry."""
    indices, tables = settings["indices"], settings["lut"][..., 0]
    spread = np.broadcast_to(tables, (*indices.shape, tables.shape[-1]))
    return np.take_along_axis(spread, indices[..., None], axis=-1)[..., 0]


EXPANSIONS: dict[str, Callable[[OperationAttributes], Half]] = {
    "constexpr_blockwise_shift_scale": shift_and_scale,
    "constexpr_lut_to_dense": look_up,
}
"""Operations that Core ML runs once, at load."""
