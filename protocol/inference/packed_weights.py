"""Packed weights in the forms in which they are published, brought to that of mlx-lm's layers. Reads no numbers.

| form                         | codes                | scales of groups      | further scales                 |
|------------------------------|----------------------|-----------------------|--------------------------------|
| mlx-lm                       | weight U32           | scales, biases        | global_scale of experts        |
| compressed-tensors, integers | weight_packed I32    | weight_scale          | weight_zero_point              |
| compressed-tensors, floats   | weight_packed U8     | weight_scale F8 or U8 | weight_global_scale, a divisor |
| ModelOpt                     | weight U8 or F8_E4M3 | weight_scale F8 or U8 | weight_scale_2, a factor       |
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm import utils
from mlx_lm.models.switch_layers import SwitchLinear

from protocol.errors import InputError

Weights = dict[str, mx.array]

form_of: Callable[[str, Any, Mapping[str, mx.array]], dict[str, Any]] = vars(utils)["infer_quant_config"]
"""From a layer's path, the layer before it is packed, and tensors by name: how it is packed, as `to_quantized` takes
it. Sizes alone tell that."""
_flattened: Callable[[Any], list[tuple[str, mx.array]]] = vars(utils)["tree_flatten"]
_LARGEST = 6.0 * 448
"""NVFP4's largest code times its largest scale: MLX's global scale is the number that they stand for."""
_FURTHER = ("shape", "zero_point", "scale_2", "global_scale")
_WITHOUT_MEANING = (".input_scale", ".input_global_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Of activations and KV, which are not packed here."""
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(\w+)")
_INNER = re.compile(r"(\.experts)?\.\w+(?=\.\w+$)")
"""What the path of a layer's experts has more."""
_SCALE = re.compile(r"scale|zero|g_idx|absmax|quant")


class ScaledLinear(nn.QuantizedLinear):
    """A layer in NVFP4 whose weights have one more scale, which MLX's product does not take."""

    def __call__(self, x: mx.array) -> mx.array:
        layer: Any = self
        y = mx.quantized_matmul(x, layer.weight, layer.scales, None, True, self.group_size, self.bits, self.mode)
        y = (y * (layer.global_scale / _LARGEST)).astype(x.dtype)
        return y + layer.bias if "bias" in layer else y


class _Scalable(nn.Linear):
    """mlx-lm's loader looks for the argument `global_scale`."""

    def to_quantized(self, *form: Any, global_scale: bool = True, **named: Any) -> Any:
        packed: Any = super().to_quantized(*form, **named)
        packed.__class__, packed.global_scale = ScaledLinear, mx.ones(())
        return packed


def dequantized(network: Any) -> Any:
    """The network, its packed layers replaced by plain ones."""
    scales = {path: module.global_scale for path, module in network.named_modules() if "global_scale" in module}
    utils.dequantize_model(network)
    for path, module in network.named_modules():
        if path in scales:
            factor = (scales[path] / _LARGEST).reshape(-1, *[1] * (module.weight.ndim - 1))
            module.weight = module.weight.astype(mx.float32) * factor
    return network


def in_mlx_form(weights: Weights) -> Weights:
    """`weights` with those of other publishers as mlx-lm has them. MLX reads every type of 8 bits as uint8."""
    made = {name: array for name, array in weights.items() if not name.endswith(_WITHOUT_MEANING)}
    for name in [name for name in weights if name.endswith(".weight_scale")]:
        path, scales = name.removesuffix(".weight_scale"), weights[name]
        codes = weights.get(f"{path}.weight_packed", weights.get(f"{path}.weight", scales))
        shape, zeros, factor, divisor = (weights.get(f"{path}.weight_{kind}") for kind in _FURTHER)
        columns: Any = shape[-1].item() if shape is not None and codes.dtype == mx.int32 else 0
        if columns and codes.shape[-1] * 32 % columns == 0:
            found = _integers(codes, scales, zeros, columns)
        elif codes.dtype == scales.dtype == mx.uint8:
            found = {"weight": codes.view(mx.uint32), "scales": scales}
            if divisor is not None:
                factor = 1 / divisor
            if factor is not None:
                found["global_scale"] = _LARGEST * mx.reshape(factor, ())
        else:
            continue
        for kind in ("packed", "scale", *_FURTHER):
            made.pop(f"{path}.weight_{kind}", None)
        made |= {f"{path}.{kind}": array for kind, array in found.items()}
    return made


def _integers(codes: mx.array, scales: mx.array, zeros: mx.array | None, columns: int) -> Weights:
    """A code q stands for (q - zero) scale; without zeros they are all in the middle."""
    bits, group = codes.shape[-1] * 32 // columns, columns // scales.shape[-1]
    zero: Any = 1 << (bits - 1)
    if zeros is not None:
        rows = zeros.view(mx.uint32)[:, None] >> mx.arange(0, 32, bits, mx.uint32)[:, None]
        zero = mx.reshape(rows & ((1 << bits) - 1), (-1, zeros.shape[1]))[: len(codes)].astype(mx.float32)
    # MLX has groups of these sizes.
    parts = group // next((size for size in (128, 64, 32) if group % size == 0), group)
    found = {"scales": scales, "biases": (-zero * scales).astype(scales.dtype)}
    return {"weight": codes.view(mx.uint32)} | {kind: mx.repeat(each, parts, -1) for kind, each in found.items()}


def unpack_latents(network: Any, weights: Weights) -> None:
    """Unpack the matrices that mlx-lm divides and transposes: it would pack them again, with other numbers."""
    values = [module.unembed_out for _, module in network.named_modules() if "unembed_out" in module]
    for scales in [name for name in weights if values and name.endswith(".kv_b_proj.scales")]:
        path = scales.removesuffix(".scales")
        form = form_of(path, values[0], weights)
        codes, biases = weights.pop(f"{path}.weight"), weights.pop(f"{path}.biases", None)
        weights[f"{path}.weight"] = mx.dequantize(codes, weights.pop(scales), biases, **form)


def join_experts(network: Any, weights: Weights) -> Weights:
    """`weights` with the tensors of single experts joined for each layer where mlx-lm has left that out."""
    paths = [path for path, module in network.named_modules() if isinstance(module, SwitchLinear)]
    layers, experts = {_INNER.sub("", path): path for path in paths}, dict[str, dict[int, mx.array]]()
    for name in list(weights):
        if (part := _EXPERT.fullmatch(name)) and (path := layers.get(f"{part[1]}.{part[3]}")):
            experts.setdefault(f"{path}.{part[4]}", {})[int(part[2])] = weights.pop(name)
    return weights | {name: mx.stack([parts[each] for each in sorted(parts)]) for name, parts in experts.items()}


def examine(network: Any, stored: Weights, weights: Weights) -> None:
    """Raise InputError for codes that would be taken for numbers, and for scales that nobody reads.
    `weights`: what mlx-lm has made of `stored`."""
    expected: Weights = dict(_flattened(network.parameters()))
    modules: dict[str, Any] = dict(network.named_modules())
    left, both = {name.rpartition(".")[2] for name in weights}, stored | weights
    for name, array in both.items():
        path, _, kind = name.replace(".weight.", ".").rpartition(".")
        module, is_scale = modules.get(path), _SCALE.search(kind) is not None
        packed = f"{path}.scales" in weights and hasattr(module, "to_quantized")
        if name in expected:
            is_code = not mx.issubdtype(array.dtype, mx.floating)
            wrong = is_code and not packed and mx.issubdtype(expected[name].dtype, mx.floating)
        elif name in weights:
            wrong = is_scale and not (packed and kind in ("scales", "global_scale"))
        else:
            wrong = is_scale and kind not in (*left, "weight_scale_inv") and f"{path}.weight" in stored
        if wrong:
            codes = next((both[each] for each in (f"{path}.weight", f"{path}.weight_packed") if each in both), array)
            numbers = expected.get(f"{path}.weight", codes).size
            raise InputError(
                f"The tensor {name} belongs to weights of {8 * codes.nbytes // numbers} bits in a form that can't be "
                "read: choose the model in mlx-lm's format (mlx-community has many), or one that is not quantised."
            )
        if kind == "global_scale" and packed and type(module) is nn.Linear:
            module.__class__ = _Scalable
