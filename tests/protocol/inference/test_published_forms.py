"""Models as mlx-community, LM Studio, Unsloth, NVIDIA and RedHat pack them give the logits of the weights that they
mean, or a sentence with the tensor and its bits."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.inference.stored_model import load_network, ready_for_processor
from tests.support.models.architectures import configuration, tiny
from tests.support.models.published_forms import (
    Form,
    Stored,
    floats,
    integers,
    modelopt,
    vllm_floats,
    whole,
    without_groups,
    write,
)

_SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64}
_NVIDIA = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}}
_REDHAT = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}


def _mlx(bits: int, group: int, *entry: Any, mode: str = "affine") -> dict[str, Any]:
    """`entry`: bits and group of a part of each layer, and its path."""
    stated = {"group_size": group, "bits": bits, "mode": mode}
    single = [(path.format(layer), bits, group) for bits, group, path in (entry and [entry]) for layer in range(4)]
    return {"quantization": stated | {path: {"bits": bits, "group_size": group} for path, bits, group in single}}


_LAYER, _INNER, _OUTER = (f"{name}.layers.{{}}." for name in ("model", "model.language_model", "language_model.model"))
_4, _EXPERTS = integers(4, 64), "switch_mlp|experts"
PUBLISHED: dict[str, tuple[str, dict[str, Form], dict[str, Any]]] = {
    # The family, the forms of modules whose names have a part, the first one that fits, and what config.json states.
    "mlx-community 4bit": ("llama", {"": _4}, _mlx(4, 64)),
    "mlx-community mixed_4_6": ("llama", {"up": integers(6, 64), "": _4}, _mlx(4, 64, 6, 64, _LAYER + "mlp.up_proj")),
    "Intel AutoRound, Unsloth UD-MLX": (
        *("qwen3_5", {"down": integers(8, 32), "embed|mlp": _4}),
        _mlx(4, 64, 8, 32, _INNER + "mlp.down_proj"),
    ),
    "LM Studio, a class around it": (
        "llama",
        {"up": integers(8, 64), "": _4},
        _mlx(4, 64, 8, 64, _OUTER + "mlp.up_proj"),
    ),
    "entries that its tensors contradict": ("llama", {"": _4}, _mlx(4, 64, 8, 64, _LAYER + "mlp.up_proj")),
    "mlx-community MXFP4-Q8": (
        *("gpt_oss", {_EXPERTS: floats(4, 32), "": integers(8, 64)}),
        _mlx(4, 32, 8, 64, _LAYER + "self_attn.q_proj", mode="mxfp4"),
    ),
    "mlx-community mxfp8": ("llama", {"": floats(8, 32)}, _mlx(8, 32, mode="mxfp8")),
    "mlx-community nvfp4": ("qwen3_moe", {"": floats(4, 16)}, _mlx(4, 16, mode="nvfp4")),
    "mlx-lm NVFP4 experts": ("qwen3_moe", {_EXPERTS: floats(4, 16, "global_scale")}, _mlx(4, 16, mode="nvfp4")),
    "DeepSeek, kv_b_proj at 8 bits": (
        *("deepseek_v3", {"kv_b": integers(8, 32), "o_proj|up": integers(4, 32)}),
        _mlx(4, 32, 8, 32, _LAYER + "self_attn.kv_b_proj"),
    ),
    "DeepSeek, kv_b_proj in MXFP4": ("deepseek_v3", {"kv_b": floats(4, 32)}, _mlx(4, 32, mode="mxfp4")),
    "Ling, kv_b_proj at 8 bits": ("bailing_hybrid", {"kv_b": integers(8, 32)}, _mlx(8, 32)),
    "NVIDIA NVFP4": ("qwen2", {"proj": modelopt(4, 16)}, _NVIDIA),
    "NVIDIA NVFP4, hf_quant_config.json": ("llama", {"proj": modelopt(4, 16)}, {}),
    "NVIDIA NVFP4 experts": ("qwen3_moe", {"proj": modelopt(4, 16)}, _NVIDIA),
    "NVIDIA MXFP8": ("llama", {"proj": modelopt(8, 32)}, _NVIDIA),
    "RedHat NVFP4": ("llama", {"proj": vllm_floats(16)}, _REDHAT),
    "RedHat MXFP4": ("llama", {"proj": vllm_floats(32)}, _REDHAT),
    "RedHat w4a16": ("qwen3_5", {"mlp": integers(4, 128, vllm=True)}, _REDHAT),
    "RedHat w4a16, zero points": ("llama", {"proj": integers(4, 32, vllm=True, zeros=True)}, _REDHAT),
    "RedHat w8a16 rows": ("llama", {"proj": integers(8, vllm=True)}, _REDHAT),
    "RedHat w8a16 DeepSeek": ("deepseek_v3", {"o_proj": integers(8, 32, vllm=True)}, _REDHAT),
    "RedHat w4a16 experts": ("qwen3_moe", {_EXPERTS: integers(4, 32, vllm=True)}, _REDHAT),
}
REFUSED = {
    "RedHat FP8": ("llama", without_groups("F8_E4M3", "weight_scale"), "proj.weight_scale .* 8 bits"),
    "RedHat FP8 DeepSeek": ("deepseek_v3", without_groups("F8_E4M3", "weight_scale"), "proj.weight.* 8 bits"),
    "Qwen FP8": ("qwen3", without_groups("F8_E4M3", "weight_scale_inv"), "proj.weight_scale_inv .* 8 bits"),
    "NVIDIA NVFP4_AWQ": ("llama", without_groups("F16", "pre_quant_scale"), "proj.pre_quant_scale .* 16 bits"),
    "scales that mlx-lm drops": ("deepseek_v3", without_groups("F16", "weight_scale"), "weight_scale .* 16 bits"),
    "Unsloth bnb-4bit": ("llama", without_groups("U8", "weight.absmax"), "proj.weight.* 4 bits"),
}


def _folders(folder: Path, family: str, forms: dict[str, Form], stated: dict[str, Any]) -> tuple[Path, Path]:
    """As it is published, and with the same weights as plain numbers."""
    random, packed, plain = np.random.default_rng(5), Stored(), Stored()
    sizes = {name: size for name, size in _SIZES.items() if name in str(configuration(family))}
    config = configuration(family, **sizes)
    network: dict[str, mx.array] = dict(tree_flatten(tiny(family, **sizes).parameters()))
    if family in ("qwen3_5", "deepseek_v3", "bailing_hybrid") or "quantization" not in stated:
        network = _as_in_transformers(network)
    for name, array in network.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or array.ndim < 2 or re.search(r"conv|gate$|router", module):
            packed[name] = plain[name] = ("F32", np.array(array))
            continue
        form = next((form for part, form in forms.items() if re.search(part, module)), whole)
        stored, values = form(random, array.shape)
        packed |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        plain[name] = ("F32", values)
    return write(folder / "packed", config | stated, packed), write(folder / "plain", config, plain)


def _as_in_transformers(network: dict[str, mx.array]) -> dict[str, mx.array]:
    made = dict[str, mx.array]()
    for name, array in network.items():
        outer = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm")
        if "embed_q" in name:
            rows = mx.concatenate([array.swapaxes(-1, -2), network[name.replace("embed_q", "unembed_out")]], 1)
            made[name.replace("embed_q", "kv_b_proj")] = rows.reshape(-1, rows.shape[-1])
        elif "switch_mlp" in name:
            made |= {outer.replace("switch_mlp", f"experts.{n}"): each for n, each in enumerate(array)}
        elif "unembed_out" not in name:
            made[outer] = array
    return made


def _deviation(network: Any, other: np.ndarray | None) -> Any:
    logits = np.array(network(mx.array([[1, 2, 3, 4, 5, 6, 7]])).astype(mx.float32))
    return logits if other is None else np.abs(logits - other).max() / np.abs(other).max()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PUBLISHED)
def test_packed_weights_give_the_logits_of_what_they_mean(name: str, tmp_path: Path):
    packed, plain = _folders(tmp_path, *PUBLISHED[name])
    if "hf_quant_config" in name:
        (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    expected = _deviation(load_network(plain)[0], None)
    network, _ = load_network(packed)

    if "NVFP4 experts" not in name:  # MLX multiplies by their own scales on a GPU alone
        assert _deviation(network, expected) < 1e-4
    ready_for_processor(network)
    assert _deviation(network, expected) < 1e-5
    arrays: Any = tree_flatten(network.parameters())
    held = sum(array.nbytes for _, array in arrays)
    assert held <= ModelFolder(packed).loaded_bytes(on_processor=True) <= 2 * held


@pytest.mark.parametrize("name", REFUSED)
def test_what_mlx_has_no_form_for_is_refused_by_tensor_and_bits(name: str, tmp_path: Path):
    family, form, words = REFUSED[name]
    packed, _ = _folders(tmp_path, family, {"o_proj": form}, {})

    with pytest.raises(InputError, match=f"can't be used. The tensor .*{words}"):
        load_network(packed)
