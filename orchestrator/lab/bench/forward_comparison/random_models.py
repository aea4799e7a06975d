"""A random dense model for each kind of layer. Nothing is downloaded. Knows no caches."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx

from orchestrator.lab.bench.forward_comparison.messages import LayerKind, ModelSize

_HEAD = 64
_WINDOW = 128
_CONTEXT = 4096
_PERIOD = 4
"""In a model of two kinds of layers every fourth one has full attention."""


class _Size(NamedTuple):
    hidden: int
    layers: int
    vocabulary: int


_SIZES: Mapping[ModelSize, _Size] = {"measured": _Size(1024, 20, 16_384), "tiny": _Size(128, 4, 256)}


def random_network(kind: LayerKind, size: ModelSize) -> Any:
    """An mlx-lm model with float32 weights, which are computed."""
    architecture, particular = _KINDS[kind]
    sizes = _SIZES[size]
    module = import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(0)
    arguments = {**_common(sizes), **particular(sizes), "model_type": architecture}
    network = module.Model(module.ModelArgs.from_dict(arguments))
    network.set_dtype(mx.float32)
    network.eval()
    mx.eval(network.parameters())
    return network


def same_network(network: Any) -> Any:
    """Another model object with the same weights, in the same memory."""
    other = type(network)(network.args)
    other.update(network.parameters())
    other.eval()
    return other


def _common(size: _Size) -> dict[str, Any]:
    heads = size.hidden // _HEAD
    return {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocabulary,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": _HEAD,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }


def _windows(_: _Size) -> dict[str, Any]:
    return {"sliding_window": _WINDOW, "sliding_window_pattern": _PERIOD, "query_pre_attn_scalar": _HEAD}


def _latent(size: _Size) -> dict[str, Any]:
    return {
        "first_k_dense_replace": size.layers,
        "kv_lora_rank": size.hidden // 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _HEAD // 2,
        "v_head_dim": _HEAD,
    }


def _delta(size: _Size) -> dict[str, Any]:
    heads = size.hidden // _HEAD
    return {
        "full_attention_interval": _PERIOD,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2 * _HEAD),
        "linear_conv_kernel_dim": 4,
    }


def _space(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "mamba", "attention"),
        "mamba_n_heads": 2 * size.hidden // _HEAD,
        "mamba_d_head": _HEAD,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "shared_intermediate_size": 3 * size.hidden,
        **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
        "attention_multiplier": _HEAD**-0.5,
    }


def _convolution(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "conv", "full_attention"),
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": size.hidden,
        "block_ff_dim": 3 * size.hidden,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _rwkv(size: _Size) -> dict[str, Any]:
    ranks = ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim")
    return dict.fromkeys(ranks, size.hidden // 16)


def _alternating(size: _Size, common: str, every_fourth: str) -> list[str]:
    return [common if (layer + 1) % _PERIOD else every_fourth for layer in range(size.layers)]


_KINDS: Mapping[LayerKind, tuple[str, Callable[[_Size], dict[str, Any]]]] = {
    "attention": ("qwen3", lambda _: {}),
    "windows": ("gemma3_text", _windows),
    "latent": ("deepseek_v3", _latent),
    "delta": ("qwen3_5", _delta),
    "space": ("granitemoehybrid", _space),
    "convolution": ("lfm2", _convolution),
    "rwkv": ("rwkv7", _rwkv),
}
"""The module of mlx-lm, and the fields that only this kind has."""
