"""Random models of mlx-lm's with layers of one kind, in the shapes of models that people run. Nothing is downloaded."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx

from orchestrator.lab.forwards import LayerKind, ModelSize

_CONTEXT = 65_536
_PERIOD = 4
"""In a model of two kinds of layers every fourth one has full attention, where the model that is named has no other
share."""


class _Size(NamedTuple):
    """Of a layer with attention, and the layers."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    layers: int
    vocabulary: int = 4096


_TINY = _Size(hidden=128, heads=2, kv_heads=1, head=64, feed_forward=384, layers=4, vocabulary=256)
_ROWS_OF_EXPERTS = 8
"""Experts of one token."""


def random_network(kind: LayerKind, size: ModelSize) -> Any:
    """An mlx-lm model with float32 weights, which are computed."""
    architecture, measured, particular = _KINDS[kind]
    sizes = measured if size == "measured" else _TINY
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
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocabulary,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }


def _experts(size: _Size) -> dict[str, Any]:
    return {
        "num_experts": 16 * _ROWS_OF_EXPERTS,
        "num_experts_per_tok": _ROWS_OF_EXPERTS,
        "moe_intermediate_size": size.feed_forward // _ROWS_OF_EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _windows(size: _Size) -> dict[str, Any]:
    return {
        "sliding_window": 4 * size.head,
        "sliding_window_pattern": min(6, size.layers),
        "query_pre_attn_scalar": size.head,
    }


def _latent(size: _Size) -> dict[str, Any]:
    return {
        "first_k_dense_replace": size.layers,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": size.hidden // 4,
        "q_lora_rank": 3 * size.hidden // 8,
        "qk_nope_head_dim": 3 * size.head // 4,
        "qk_rope_head_dim": size.head // 4,
        "v_head_dim": size.head,
    }


def _delta(size: _Size) -> dict[str, Any]:
    return {
        "full_attention_interval": _PERIOD,
        "linear_num_key_heads": size.heads,
        "linear_num_value_heads": 2 * size.heads,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
        "linear_conv_kernel_dim": 4,
    }


def _space(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "mamba", "attention"),
        "mamba_n_heads": 2 * size.heads,
        "mamba_d_head": size.head,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "shared_intermediate_size": size.feed_forward,
        **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
        "attention_multiplier": size.head**-0.5,
    }


def _convolution(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "conv", "full_attention"),
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": size.hidden,
        "block_ff_dim": size.feed_forward,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _rwkv(size: _Size) -> dict[str, Any]:
    ranks = ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim")
    return dict.fromkeys(ranks, size.hidden // 16)


def _alternating(size: _Size, common: str, every_fourth: str) -> list[str]:
    return [common if (layer + 1) % _PERIOD else every_fourth for layer in range(size.layers)]


_KINDS: Mapping[LayerKind, tuple[str, _Size, Callable[[_Size], dict[str, Any]]]] = {
    "attention": ("qwen3", _Size(4096, 32, 8, 128, 12_288, 2), lambda _: {}),  # Qwen3-8B
    "experts": ("qwen3_moe", _Size(2048, 32, 4, 128, 6144, 1), _experts),  # Qwen3-30B-A3B
    "windows": ("gemma3_text", _Size(2560, 8, 4, 256, 10_240, 6), _windows),  # Gemma 3 4B
    "latent": ("deepseek_v3", _Size(2048, 20, 20, 256, 7680, 3), _latent),  # GLM-4.7-Flash, its experts as one
    "delta": ("qwen3_5", _Size(2560, 16, 4, 256, 9216, 4), _delta),  # Qwen3.5-4B
    "space": ("granitemoehybrid", _Size(2048, 32, 8, 64, 8192, 4), _space),  # Granite 4.0 H Micro
    "convolution": ("lfm2", _Size(2048, 32, 8, 64, 10_752, 4), _convolution),  # LFM2-2.6B
    "rwkv": ("rwkv7", _Size(2048, 32, 32, 64, 8192, 4), _rwkv),  # RWKV 7 1.5B
}
"""The module of mlx-lm, the sizes of a model with such layers, and the fields that only this kind has."""
