"""The config.json of networks with the keys and values of models that people run, and few features and experts.

Layers, KV heads, head sizes, windows, states and vocabulary are the real model's; it has as many query heads as KV
heads.
"""

from typing import Any

_FEATURES, _INNER = 64, 64
_WIDTHS = {"hidden_size": _FEATURES, "intermediate_size": _INNER, "rms_norm_eps": 1e-6}
_EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": _INNER}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 2,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        **_EXPERTS,
    },
    "qwen3.8-27b": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_value_heads": 48,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248_320,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": True,
            **_WIDTHS,
        },
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 47,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 2,
        "vocab_size": 154_880,
        "max_position_embeddings": 202_752,
        **_EXPERTS,
    },
}
"""The content of config.json, by name, without what all of them share."""


WEIGHTS = {"qwen3-8b": 4.3, "gemma-3-12b": 6.6, "gpt-oss-20b": 11.3, "qwen3.8-27b": 14.2, "glm-4.7-flash": 15.7}
"""Of the real models in 4 bits, GiB, about."""


def configuration(shape: str) -> dict[str, Any]:
    """The config.json of the network of this shape."""
    return {"eos_token_id": 0, **_WIDTHS, **SHAPES[shape]}
