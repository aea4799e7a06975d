"""GGUF's architectures in mlx-lm's terms: config.json, the tensors' names, the order of their rows.

Knows no bytes of a tensor but those of a few rope factors.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from orchestrator.machine.gguf.container import GgufFile, GgufTensor, Laid
from orchestrator.machine.gguf.weights import floats
from protocol.errors import InputError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHARED_EXPERT = {f"ffn_{each}_shexp": f"{each}_proj" for each in ("gate", "up", "down")}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""They become settings of config.json."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3; the file has only the factors that result."""
_TOLERANCE = 1e-3
_SIGMOID = 2
"""llama.cpp's number of that way to choose experts."""
_PER_LAYER = "per_layer_token_embd.weight"
_LARGEST = 1 << 31
"""Number in a model's metadata."""


_EXPERTS = {f"ffn_{each}_exps": f"{each}_proj" for each in ("gate", "up", "down")}
_BEFORE_AND_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms of a layer of Gemma behind its first one."""


def _named_experts(module: str, names: Mapping[str, str] = _EXPERTS) -> dict[str, str]:
    return {name: f"{module}.{each}" for name, each in names.items()}


def _nothing(_: "_Values") -> dict[str, Any]:
    return {}


def _gemma_scale(values: "_Values", largest: int) -> float:
    """Queries are scaled by a head's size, but in the model with most layers by the width of a head's share."""
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head = values.integer("attention.key_length", hidden // heads)
    return hidden / heads if values.integer("block_count") == largest else head


def _gemma2(values: "_Values") -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(values, 46),
        "attn_logit_softcapping": values.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }


def _gemma3(values: "_Values") -> dict[str, Any]:
    values.require_none("final_logit_softcapping")
    return {
        "query_pre_attn_scalar": _gemma_scale(values, 62),
        "rope_theta": values.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": values.integer("attention.sliding_window"),
        # Newer files name each layer, in the same order.
        "sliding_window_pattern": 6,
    }


def _qwen3_moe(values: "_Values") -> dict[str, Any]:
    return {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _unscaled(values: "_Values") -> None:
    """Raises InputError for scaled positions, where mlx-lm's architecture scales none."""
    if values.get("rope.scaling.type", "none") != "none":
        values.require_none("rope.scaling.type")


def _deltas(values: "_Values") -> dict[str, Any]:
    """Of models with Gated DeltaNet."""
    _unscaled(values)
    heads, rotated = values.integer("ssm.time_step_rank"), values.integer("rope.dimension_count")
    fields: dict[str, Any] = {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": values.integer("ssm.group_count"),
        "linear_key_head_dim": values.integer("ssm.state_size"),
        "linear_value_head_dim": values.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
        "full_attention_interval": values.integer("full_attention_interval", 4),
        "rope_parameters": {
            # Sections of positions are for pictures: those of text are the same in all.
            "type": "default",
            "rope_theta": values.number("rope.freq_base", 10_000.0),
            "partial_rotary_factor": rotated / values.integer("attention.key_length"),
        },
    }
    if values.get("expert_count", 0):
        fields |= {
            "num_experts": values.integer("expert_count"),
            "num_experts_per_tok": values.integer("expert_used_count"),
            "moe_intermediate_size": values.integer("expert_feed_forward_length"),
            "shared_expert_intermediate_size": values.integer("expert_shared_feed_forward_length"),
        }
    return fields


def _routed(values: "_Values") -> dict[str, Any]:
    """Of mixtures of experts as DeepSeek's and GLM's, where the first layers are dense."""
    groups = values.integer("expert_group_count", 1)
    return {
        "n_routed_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "n_shared_experts": values.get("expert_shared_count", 0) or None,
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "first_k_dense_replace": int(values.get("leading_dense_block_count", 0)),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(values.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": values.integer("expert_group_used_count", groups),
    }


def _glm4_moe(values: "_Values") -> dict[str, Any]:
    _unscaled(values)
    return {**_routed(values), "use_qk_norm": "blk.0.attn_q_norm.weight" in values.file.tensors, "rope_scaling": None}


def _sigmoid(values: "_Values") -> bool:
    """Whether experts are chosen by sigmoids, by which DeepSeek V3 and GLM-4.7-Flash differ from DeepSeek V2."""
    stated = values.get("expert_gating_func")
    return any("exp_probs_b" in name for name in values.file.tensors) if stated is None else stated == _SIGMOID


def _latent(values: "_Values") -> dict[str, Any]:
    rotated = values.integer("rope.dimension_count")
    key = values.get("attention.key_length_mla") or values.integer("attention.key_length")
    scaling = _rope_scaling(values, 0).get("rope_scaling")
    if scaling is not None:
        # llama.cpp's converter writes a tenth of it. Both parts of the scale are the same in all published models.
        scale = 10 * float(values.get("rope.scaling.yarn_log_multiplier", 0.0))
        scaling |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return {
        **_routed(values),
        "num_key_value_heads": values.integer("attention.head_count"),
        "kv_lora_rank": values.integer("attention.kv_lora_rank"),
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": values.get("attention.value_length_mla") or values.integer("attention.value_length"),
        "head_dim": rotated,
        "rope_scaling": scaling,
    }


def _deepseek(values: "_Values") -> dict[str, Any]:
    fields = _latent(values)
    if _sigmoid(values):
        return fields
    if fields["norm_topk_prob"]:
        raise InputError(
            f"{values.file.path} adds the shares of its experts up to 1, which mlx-lm's deepseek_v2 does not compute: "
            "choose another."
        )
    # mlx-lm's code needs a scaling; one by 1 changes nothing.
    one = {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": values.integer("context_length")}
    greedy = "greedy" if fields["n_group"] == 1 else "group_limited_greedy"
    scaling = fields["rope_scaling"] or one
    return {**fields, "model_type": "deepseek_v2", "topk_method": greedy, "rope_scaling": scaling}


def _gemma3n(values: "_Values") -> dict[str, Any]:
    file, layers = values.file, values.integer("block_count")
    windowed = values.get("attention.sliding_window_pattern", np.arange(layers) % 5 < 4)
    sparse, embedding = values.get("activation_sparsity_scale"), file.tensors.get(_PER_LAYER)
    laurel = file.tensors.get("blk.0.laurel_l.weight")
    if not isinstance(windowed, np.ndarray) or len(windowed) != layers:
        raise values.wrong("attention.sliding_window_pattern", windowed)
    if not isinstance(sparse, np.ndarray) or len(sparse) != layers:
        raise values.wrong("activation_sparsity_scale", sparse)
    if embedding is None or laurel is None:
        raise InputError(f"{file.path} lacks {_PER_LAYER} or blk.0.laurel_l.weight: download the file again.")
    inner = _by_layer(values, "feed_forward_length", layers)
    return {
        "head_dim": values.integer("attention.key_length"),
        "intermediate_size": inner if len(set(inner)) > 1 else inner[0],
        "vocab_size_per_layer_input": embedding.shape[0],
        "hidden_size_per_layer_input": values.integer("embedding_length_per_layer_input"),
        "num_kv_shared_layers": int(values.get("attention.shared_kv_layers", max(0, layers - 20))),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed.tolist()],
        "sliding_window": values.integer("attention.sliding_window"),
        # The file has the number of standard deviations of which this is the share below.
        "activation_sparsity_pattern": [round(math.erfc(-each / math.sqrt(2)) / 2, 6) for each in sparse.tolist()],
        "altup_num_inputs": values.integer("altup.num_inputs"),
        "altup_active_idx": int(values.get("altup.active_idx", 0)),
        # These are the same in all published models, and in no file.
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "laurel_rank": laurel.shape[0],
        "rope_theta": values.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
        "rope_scaling": None,
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
    }


def _gemma4(values: "_Values") -> dict[str, Any]:
    file, layers = values.file, values.integer("block_count")
    windowed = values.get("attention.sliding_window_pattern")
    if not isinstance(windowed, np.ndarray) or len(windowed) != layers or windowed.all():
        raise values.wrong("attention.sliding_window_pattern", windowed)
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed.tolist()]
    heads, inner = (_by_layer(values, key, layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    full = kinds.index("full_attention")
    head = values.integer("attention.key_length")
    # Frequencies behind the rotated ones are divided by a huge number.
    factors = file.tensors.get("rope_freqs.weight")
    turned = [1.0] if factors is None else [1.0 if each == 1.0 else 0.0 for each in _factors(factors)]
    per_layer, embedding = values.get("embedding_length_per_layer_input", 0), file.tensors.get(_PER_LAYER)
    return {
        "head_dim": values.integer("attention.key_length_swa", head),
        "global_head_dim": head,
        "num_key_value_heads": heads[kinds.index("sliding_attention")] if "sliding_attention" in kinds else heads[0],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": int(values.get("attention.shared_kv_layers", 0)),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": per_layer,
        "partial_rotary_factor": 1.0,
        "vocab_size_per_layer_input": _vocabulary(file) if embedding is None else embedding.shape[0],
        "layer_types": kinds,
        "sliding_window": values.integer("attention.sliding_window"),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": values.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": sum(turned) / len(turned),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": values.number("rope.freq_base_swa", 10_000.0),
            },
        },
        "enable_moe_block": bool(values.get("expert_count", 0)),
        "num_experts": values.get("expert_count") or None,
        "top_k_experts": values.get("expert_used_count"),
        "moe_intermediate_size": values.get("expert_feed_forward_length"),
    }


def _by_layer(values: "_Values", key: str, layers: int) -> list[int]:
    """A number for each layer, which the file has for all of them or for each."""
    found = values.get(key)
    each = found.tolist() if isinstance(found, np.ndarray) else [found] * layers
    if len(each) != layers or not all(isinstance(one, int) and one > 0 for one in each):
        raise values.wrong(key, found)
    return each


def _gpt_oss(values: "_Values") -> dict[str, Any]:
    return {
        "num_local_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "sliding_window": values.integer("attention.sliding_window"),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(values.integer("block_count"))
        ],
    }


def _granite(values: "_Values") -> dict[str, Any]:
    head = values.integer("embedding_length") // values.integer("attention.head_count")
    fields = {
        "attention_multiplier": values.number("attention.scale", head**-0.5),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
    }
    if not (experts := values.get("expert_count", 0)):
        return fields
    return {**fields, "num_local_experts": experts, "num_experts_per_tok": values.integer("expert_used_count")}


def _ministral3(values: "_Values") -> dict[str, Any]:
    scaling = _rope_scaling(values, 0).get("rope_scaling") or {"type": "default"}
    log = values.get("rope.scaling.yarn_log_multiplier")
    # Both parts of the scale are the same, so that they cancel out.
    scales = {} if log is None else {"mscale": float(log), "mscale_all_dim": float(log)}
    original = scaling.get("original_max_position_embeddings", values.integer("context_length"))
    return {
        "rope_parameters": {
            **scaling,
            **scales,
            "rope_theta": values.number("rope.freq_base", 10_000.0),
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": float(values.get("attention.temperature_scale", 0.0)),
        }
    }


def _glm4(values: "_Values") -> dict[str, Any]:
    # With sections for pictures, rows of q and k are in another order.
    values.require_none("rope.dimension_sections")
    return {}


def _short_convolutions(values: "_Values") -> dict[str, Any]:
    heads = values.get("attention.head_count_kv")
    if not isinstance(heads, np.ndarray) or len(heads) != values.integer("block_count"):
        raise values.wrong("attention.head_count_kv", heads)
    return {
        "num_key_value_heads": int(heads.max()),
        "layer_types": ["full_attention" if count else "conv" for count in heads.tolist()],
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in values.file.tensors,
    }


def _lfm2(values: "_Values") -> dict[str, Any]:
    return {
        **_short_convolutions(values),
        "block_dim": values.integer("embedding_length"),
        "block_ff_dim": values.integer("feed_forward_length"),
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(values: "_Values") -> dict[str, Any]:
    if values.get("expert_gating_func") != _SIGMOID:
        raise values.wrong("expert_gating_func", values.get("expert_gating_func"))
    return {
        **_short_convolutions(values),
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "num_dense_layers": int(values.get("leading_dense_block_count", 0)),
        "use_expert_bias": any("exp_probs_b" in name for name in values.file.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
    }


class Architecture(NamedTuple):
    """`model_type`: mlx-lm's name."""

    model_type: str
    inner: Mapping[str, str] = _INNER
    """A layer's tensors, without `.weight` and `.bias` where the names have it in both."""
    outer: Mapping[str, str] = _OUTER
    fields: Callable[["_Values"], dict[str, Any]] = _nothing
    """Fields of config.json beside those that all have, or in their place."""
    permuted: bool = False
    """Rows of q and k alternate between the halves of a head, which mlx-lm has one after the other."""
    partial: bool = False
    """Only a part of a head may be rotated."""
    experts: bool = False
    """It is a mixture of experts."""
    norm_offset: float = 0.0
    """What the file adds to the weights of norms."""
    prefix: str = ""
    """In front of the names of all tensors."""
    layers: str = "model.layers"
    nested: bool = False
    """mlx-lm reads the fields in `text_config`."""
    tiled: bool = False
    """Heads of values of a linear attention stand in the order of ggml's repetition: those with the first key head are
    the first one of each run, where mlx-lm has all of one key head together."""


_QWEN3 = _INNER | _NORMED_HEADS
_DELTA = {
    **_QWEN3,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba.weight": "",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_up_exps.weight": "mlp.switch_mlp.gate_up_proj.weight",
    **_named_experts("mlp.switch_mlp"),
    **_named_experts("mlp.shared_expert", _SHARED_EXPERT),
}
"""Layers of Gated DeltaNet, and attention with a gate."""
_ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **_named_experts("mlp.switch_mlp"),
    **_named_experts("mlp.shared_experts", _SHARED_EXPERT),
}
_LATENT = {
    **_INNER,
    **_ROUTED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
"""Attention to latent keys."""
_PER_LAYER_INNER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Of embeddings for each layer, as Gemma 3n and 4 have them."""
_PER_LAYER_OUTER = {
    **_OUTER,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_CONVOLUTIONS = {
    **_INNER,
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
"""Layers of LFM2."""
_CONVOLUTIONS_OUTER = _OUTER | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_SPARSE = {"ffn_gate_inp": "mlp.gate", **_named_experts("mlp.switch_mlp")}
_ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _QWEN3),
    "qwen3moe": Architecture("qwen3_moe", _QWEN3 | _SPARSE, fields=_qwen3_moe, experts=True),
    "phi3": Architecture("phi3", _INNER | _FUSED, partial=True),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _INNER | _BEFORE_AND_BEHIND, fields=_gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _QWEN3 | _BEFORE_AND_BEHIND, fields=_gemma3, norm_offset=1.0),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_INNER,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            **_named_experts("mlp.experts"),
        },
        fields=_gpt_oss,
        experts=True,
    ),
    "granite": Architecture("granite", fields=_granite, permuted=True),
    "granitemoe": Architecture(
        "granitemoe",
        {
            **_INNER,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **_named_experts("block_sparse_moe.switch_mlp"),
        },
        fields=_granite,
        permuted=True,
        experts=True,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            **_CONVOLUTIONS,
            "ffn_gate": "feed_forward.w1",
            "ffn_down": "feed_forward.w2",
            "ffn_up": "feed_forward.w3",
        },
        _CONVOLUTIONS_OUTER,
        _lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {
            **_CONVOLUTIONS,
            **{f"ffn_{each}": f"feed_forward.{each}_proj" for each in ("gate", "down", "up")},
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
            **_named_experts("feed_forward.switch_mlp"),
        },
        _CONVOLUTIONS_OUTER,
        _lfm2moe,
        experts=True,
    ),
    "glm4": Architecture(
        "glm4",
        {
            **_INNER,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        fields=_glm4,
        partial=True,
    ),
    "gemma3n": Architecture(
        "gemma3n",
        {
            **_QWEN3,
            **_BEFORE_AND_BEHIND,
            **_PER_LAYER_INNER,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        {
            **{name: each.replace("model.", "model.language_model.") for name, each in _PER_LAYER_OUTER.items()},
            "altup_proj.weight": "model.language_model.altup_projections",
            "altup_unembd_proj.weight": "model.language_model.altup_unembed_projections",
        },
        _gemma3n,
        layers="model.language_model.layers",
        nested=True,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **_QWEN3,
            **_BEFORE_AND_BEHIND,
            **_PER_LAYER_INNER,
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_up_exps.weight": "experts.switch_glu.gate_up_proj.weight",
            **_named_experts("experts.switch_glu"),
        },
        _PER_LAYER_OUTER,
        _gemma4,
        partial=True,
        experts=True,
    ),
    "qwen35": Architecture("qwen3_5", _DELTA, fields=_deltas, partial=True, prefix="language_model.", tiled=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe", _DELTA, fields=_deltas, partial=True, experts=True, prefix="language_model.", tiled=True
    ),
    # Its projections, apart from one another, are those of mlx-lm's Qwen3.5.
    "qwen3next": Architecture(
        "qwen3_5_moe", _DELTA, fields=_deltas, partial=True, experts=True, prefix="language_model."
    ),
    "deepseek2": Architecture("glm4_moe_lite", _LATENT, fields=_deepseek, experts=True),
    "glm4moe": Architecture(
        "glm4_moe",
        {**_QWEN3, **_ROUTED, "post_attention_norm": "post_attention_layernorm"},
        fields=_glm4_moe,
        partial=True,
        experts=True,
    ),
    "mistral3": Architecture("ministral3", fields=_ministral3, permuted=True),
    "smollm3": Architecture("smollm3", permuted=True),
}
"""By GGUF's name. Mistral's models are llama in both."""


def _name(file: GgufFile) -> str:
    return str(file.metadata.get("general.architecture"))


def architecture_of(file: GgufFile) -> Architecture:
    """Raises InputError for an architecture that is not known here."""
    name = _name(file)
    if name not in _ARCHITECTURES:
        raise InputError(
            f"{file.path} is of the architecture {name!r}, which can't be read from GGUF: known are "
            f"{', '.join(_ARCHITECTURES)}. Pass the model in mlx-lm's format instead."
        )
    return _ARCHITECTURES[name]


def model_config(file: GgufFile) -> dict[str, Any]:
    """config.json without quantisation and tokens. Raises InputError for an architecture that is not known here."""
    architecture, name = architecture_of(file), _name(file)
    values = _Values(file, name)
    if values.integer("block_count") > len(file.tensors):
        raise values.wrong("block_count", values.integer("block_count"))
    if values.get("expert_count", 0) and not architecture.experts:
        raise InputError(f"{file.path} is a mixture of experts, which can't be read from GGUF: pass a folder.")
    fields = architecture.fields(values)
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head = fields.get("head_dim") or values.integer("attention.key_length", hidden // max(heads, 1))
    rotated = values.integer("rope.dimension_count", head)
    if rotated != head and not architecture.partial:
        raise InputError(f"{file.path} rotates {rotated} of a head's {head} dimensions, which {name} does not do.")
    shared = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": values.integer("block_count") - int(values.get("nextn_predict_layers", 0)),
        "num_attention_heads": heads,
        "head_dim": head,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": values.integer("context_length"),
        "rope_theta": values.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "partial_rotary_factor": rotated / head,
        **({} if {"rope_scaling", "rope_parameters"} & set(fields) else _rope_scaling(values, rotated)),
    }
    if "num_key_value_heads" not in fields:
        shared["num_key_value_heads"] = values.integer("attention.head_count_kv", heads)
    if "intermediate_size" not in fields:
        # In a mixture of experts it may be that of an expert alone.
        shared["intermediate_size"] = values.integer("feed_forward_length", fields.get("moe_intermediate_size"))
    config = shared | fields
    _require_shapes(file, config)
    return {**config, "text_config": config} if architecture.nested else config


def arrays_of(file: GgufFile, config: Mapping[str, Any], tensor: GgufTensor) -> dict[str, Laid]:
    """mlx-lm's arrays that a tensor becomes, by name; none for one that config.json replaces, and for layers behind
    the model's own, which guess further tokens. Raises InputError for an unknown one."""
    architecture, name = architecture_of(file), tensor.name
    if name in _ROPE_TENSORS:
        return {}
    layer = _LAYER.fullmatch(name)
    if layer and config["num_hidden_layers"] <= int(layer[1]) < _Values(file, _name(file)).integer("block_count"):
        return {}
    place = f"{architecture.prefix}{architecture.layers}.{layer[1]}." if layer else architecture.prefix
    full, known = (layer[2], architecture.inner) if layer else (name, architecture.outer)
    stem, dot, kind = full.rpartition(".")
    if full not in known and (stem not in known or kind not in ("weight", "bias")):
        raise InputError(
            f"{file.path} has a tensor {name!r}, which its architecture does not have: pass the model in mlx-lm's "
            "format."
        )
    found = known[full] if full in known else f"{known[stem]}{dot}{kind}"
    if full == "attn_k_b.weight" and config["model_type"] == "deepseek_v2":
        return {}
    if full == "attn_v_b.weight" and config["model_type"] == "deepseek_v2":
        return {f"{place}self_attn.kv_b_proj.weight": _joined(file, config, tensor)}
    if full in _SEVERAL:
        return {f"{place}{each}": laid for each, laid in _SEVERAL[full](found, config, tensor).items()}
    return {f"{place}{found}": _laid(architecture, config, full, tensor)}


def _laid(architecture: Architecture, config: Mapping[str, Any], full: str, tensor: GgufTensor) -> Laid:
    """`full`: the tensor's name within its layer."""
    kind = full.split(".")[0]
    if full in ("shortconv.conv.weight", "ssm_conv1d.weight"):
        # A convolution has one channel a group.
        return Laid((*tensor.shape, 1), _value_heads(architecture, config, kind, len(tensor.rows)))
    if kind == "ssm_out":
        return Laid(tensor.shape, columns=_value_heads(architecture, config, kind, tensor.shape[-1]))
    if kind == "ssm_a":
        heads = _value_heads(architecture, config, kind, len(tensor.rows))
        return Laid(tensor.shape, heads, value=lambda decay: np.log(-decay))
    if kind == "exp_probs_b":
        # It is added to shares, of which the greatest are chosen.
        return Laid(tensor.shape, exact=True)
    if kind in _VALUE_HEADS:
        return Laid(tensor.shape, _value_heads(architecture, config, kind, len(tensor.rows)))
    if kind == "ffn_gate_inp_shexp":
        return Laid((1, tensor.shape[-1]))
    if architecture.permuted and (heads := _ROTATED.get(kind)):
        return Laid(tensor.shape, _halves_of_heads(tensor, config[heads], config["head_dim"]))
    if architecture.norm_offset and full.endswith("norm.weight"):
        return Laid(tensor.shape, value=lambda norm: norm - np.float32(architecture.norm_offset))
    return Laid(tensor.shape)


_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_VALUE_HEADS = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt")
"""Tensors with rows for each head of a linear attention's values, the last ones."""


def _halves_of_heads(tensor: GgufTensor, count: int, head: int) -> Any:
    """GGUF's converter interleaves the two halves of each head of q and k, for a rope that turns neighbours."""
    return _places(count * head, len(tensor.rows)).reshape(count, head // 2, 2).swapaxes(1, 2).reshape(-1)


def _value_heads(architecture: Architecture, config: Mapping[str, Any], kind: str, rows: int) -> Any:
    """Where each of `rows` stands, the last of which are those of a linear attention's values; None: in order."""
    if not architecture.tiled or "linear_num_value_heads" not in config:
        return None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head = 1 if kind in ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a") else config["linear_value_head_dim"]
    before = rows - values * head
    order = _places(values * head, rows).reshape(values // keys, keys, head).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), before + order])


def _places(count: int, rows: int) -> Any:
    """The first `count` of a tensor's rows. Raises ValueError if it has fewer, before memory is taken for them."""
    if count > rows:
        raise ValueError(f"a tensor of {rows} rows for {count}")
    return np.arange(count)


def _gate_and_up(found: str, _: Mapping[str, Any], tensor: GgufTensor) -> dict[str, Laid]:
    """Of each expert, first the rows of the gate."""
    experts, both, width = tensor.shape
    rows = np.arange(experts * both).reshape(experts, 2, both // 2)
    shape = (experts, both // 2, width)
    module = found.removesuffix(".weight")
    names = (module.replace("gate_up_proj", name) for name in ("gate_proj", "up_proj"))
    return {f"{name}.weight": Laid(shape, rows[:, half].reshape(-1)) for half, name in enumerate(names)}


def _beta_and_alpha(_: str, config: Mapping[str, Any], tensor: GgufTensor) -> dict[str, Laid]:
    """Of each key head, first the rows of the gates of input."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    rows = _places(2 * values, len(tensor.rows)).reshape(keys, 2, values // keys)
    shape = (values, tensor.shape[-1])
    names = ("in_proj_b", "in_proj_a")
    return {f"linear_attn.{name}.weight": Laid(shape, rows[:, half].reshape(-1)) for half, name in enumerate(names)}


def _apart(found: str, _: Mapping[str, Any], tensor: GgufTensor) -> dict[str, Laid]:
    """Matrices one behind the other."""
    count, rows, columns = tensor.shape
    places = np.arange(count * rows).reshape(count, rows)
    return {f"{found}.{place}.weight": Laid((rows, columns), each) for place, each in enumerate(places)}


_SEVERAL: Mapping[str, Callable[[str, Mapping[str, Any], GgufTensor], dict[str, Laid]]] = {
    "ffn_gate_up_exps.weight": _gate_and_up,
    "ssm_ba.weight": _beta_and_alpha,
    "altup_proj.weight": _apart,
    "altup_unembd_proj.weight": _apart,
}
"""Tensors that hold several arrays of mlx-lm."""


def _joined(file: GgufFile, config: Mapping[str, Any], values: GgufTensor) -> Laid:
    """DeepSeek V2's kv_b_proj, of which the file has each head's keys (transposed) and values."""
    keys = file.tensors.get(values.name.replace("attn_v_b", "attn_k_b"))
    heads, size, latent = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
    if keys is None or keys.shape != (heads, latent, size) or values.shape != (heads, config["v_head_dim"], latent):
        raise InputError(f"{file.path}: {values.name} has no keys of its heads beside it: download the file again.")

    def joined(rows: Any) -> Any:
        own = floats(np.ascontiguousarray(keys.rows), keys.kind).reshape(keys.shape).swapaxes(1, 2)
        return np.concatenate([own, rows.reshape(values.shape)], axis=1)

    return Laid((heads * (size + config["v_head_dim"]), latent), value=joined, whole=True)


class _Values:
    """Metadata of one architecture. Raises InputError for a missing value and for one of another type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise self.wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, value)
        return float(value)

    def require_none(self, key: str) -> None:
        """Raises InputError for a value of which mlx-lm's architecture knows nothing."""
        if self.get(key) is not None:
            raise InputError(
                f"{self.file.path} states {self.architecture}.{key}, which mlx-lm does not compute: choose another."
            )

    def wrong(self, key: str, value: object) -> InputError:
        """That a value is missing or can't be used."""
        words = "is missing" if value is None else "has a value that can't be used"
        return InputError(f"{self.file.path}: the metadata {self.architecture}.{key} {words}: download another file.")


def _vocabulary(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path} has no token embedding, so it is no language model: choose another file.")
    return file.tensors["token_embd.weight"].shape[0]


def _require_shapes(file: GgufFile, config: Mapping[str, Any]) -> None:
    """Raises InputError if the heads of the metadata are not those of the tensors, which the rows' order relies on."""
    for name, heads in (("blk.0.attn_q.weight", "num_attention_heads"), ("blk.0.attn_k.weight", "num_key_value_heads")):
        tensor = file.tensors.get(name)
        latent = "kv_lora_rank" in config
        if (
            tensor is not None
            and not latent
            and tensor.shape != (config[heads] * config["head_dim"], config["hidden_size"])
        ):
            raise InputError(f"{file.path}: {name} has the shape {tensor.shape}, against its metadata: download again.")


def _rope_scaling(values: _Values, rotated: int) -> dict[str, Any]:
    """The fields of config.json that scale positions; none if they are not scaled."""
    factors = {name: values.file.tensors.get(name) for name in _ROPE_TENSORS}
    freqs, long, short = ([] if each is None else _factors(each) for each in factors.values())
    if freqs:
        return {"rope_scaling": _llama3(values, np.array(freqs), rotated)}
    if long and short:
        original = values.integer("rope.scaling.original_context_length")
        longrope = {"type": "longrope", "long_factor": long, "short_factor": short}
        return {"rope_scaling": longrope, "original_max_position_embeddings": original}
    kind = values.get("rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise InputError(f"{values.file.path} scales positions by {kind!r}, which is not known: pass a folder.")
    return _SCALINGS[kind](values)


def _factors(tensor: Any) -> list[float]:
    return [float(each) for each in floats(np.ascontiguousarray(tensor.rows), tensor.kind).reshape(-1)]


def _llama3(values: _Values, found: Any, rotated: int) -> dict[str, Any]:
    """The rule whose result `found` is (Llama 3.1). Raises InputError if it is another rule's."""
    base, factor = values.number("rope.freq_base", 10_000.0), float(found.max())
    lengths = 2 * np.pi * base ** (np.arange(0, rotated, 2) / rotated)
    turns = _LLAMA3["original_max_position_embeddings"] / lengths
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=_TOLERANCE):
        raise InputError(f"{values.file.path} scales its rope in an unknown way: pass the model in mlx-lm's format.")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _linear(values: _Values) -> dict[str, Any]:
    return {"rope_scaling": {"type": "linear", "factor": values.number("rope.scaling.factor")}}


def _yarn(values: _Values) -> dict[str, Any]:
    original = values.integer("rope.scaling.original_context_length")
    factor = values.number("rope.scaling.factor")
    return {"rope_scaling": {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}}


_SCALINGS: dict[str, Callable[[_Values], dict[str, Any]]] = {
    "none": lambda _: {},
    "linear": _linear,
    "yarn": _yarn,
}
