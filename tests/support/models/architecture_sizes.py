"""Sizes and layer patterns of the tiny models: by field name for all modules, then what is particular to a module.

Every pattern of four layers shows each kind of layer that the architecture has, and no window or chunk holds more than
a small part of the context.
"""

from typing import Any

VOCABULARY = 96
WINDOW = 16
CONTEXT = 1024
"""Above what any test reads: behind a table of learned positions, MLX reads other arrays' memory."""
LAYERS = 4

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "num_vocab", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "block_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    "num_attention_groups": 2,
    "num_swa_attention_heads": 8,
    "num_swa_key_value_heads": 4,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ff_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("share_expert_dim", "moe_latent_size"), 32),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "hidden_size_per_head"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("kv_channels", "index_head_dim", "qk_head_dim"), 16),
    "global_head_dim": 32,
    **dict.fromkeys(("swa_num_key_value_heads", "num_global_key_value_heads"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank"), 32),
    "q_lora_rank": 24,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups"), 1),
    "zero_expert_num": 2,
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step", "moe_layer_interval"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    "loop_window_size": WINDOW,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "block_size"), CONTEXT),
    "original_max_position_embeddings": CONTEXT,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel", "conv_window", "conv1d_width", "short_conv_kernel_size"), 4),
    "linear_conv_kernel_dim": 4,
    "conv_L_cache": 3,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8),
    "index_n_heads": 2,
    "index_topk": 8,
    "mlp_only_layers": [1],
    "layer_types": [_SLIDING, _FULL] * 2,
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval"), 2),
    "attention_chunk_size": WINDOW,
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True),
    "linear_attn_config": {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
    "topk_method": "noaux_tc",
    "post_norm_eps": 1e-5,
    "layer_group_size": 2,
    "group_norm_size": 1,
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "layernorm_epsilon"), 1e-5
    ),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "swa_rope_theta"), 10000.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(("logits_scaling", "attention_multiplier", "residual_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("routed_scaling_factor", "scale_emb", "scale_depth"), 1.0),
    "dim_model_base": 64,
    "time_step_limit": (0.0, 100.0),
    "logits_soft_cap": 30.0,
    "gegelu_limit": 20.0,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
}
"""Values by field name, wherever a ModelArgs has the field."""

TEXT_CLASSES = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
"""Where config.json has the language model's fields under `text_config`: the module and the class that read them."""

HEAD_SIZES = {
    *("head_dim", "swa_head_dim", "swa_v_head_dim", "hidden_size_per_head", "kv_channels", "qk_head_dim"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"),
}
WIDTHS = {64, 96}
"""Values of `SIZES` that are several heads wide."""
RECIPES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "cohere": {"logit_scale": 0.75},
    "cohere2": {"logit_scale": 0.75},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "group_limited_greedy", "n_group": 2},
    "deepseek_v3": {"n_group": 2},
    "deepseek_v41": {
        "head_dim": 32,
        "index_head_dim": 32,
        "o_groups": 2,
        "compress_ratios": (0, 4, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1, 3),
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "index_topk": 4,
        "rope_scaling": _YARN,
        "rms_norm_eps": 1e-6,
    },
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, False, True]},
    "falcon_h1": {"lm_head_multiplier": 1.0},
    "gear": {"layer_types": ["conv_mixer", _SLIDING, _FULL, "conv_mixer"]},
    "gemma3n": {
        "text_config": {
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 8,
            "final_logit_softcapping": 30.0,
            "rope_local_base_freq": 10_000.0,
        }
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "enable_moe_block": True, "top_k_experts": 2},
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {
        "text_config": {
            "attn_res_block_size": 2,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
            "mla_use_output_gate": True,
        }
    },
    "laguna": {
        "num_attention_heads_per_layer": [4, 2, 4, 2],
        "rope_parameters": {_SLIDING: _ROPE, _FULL: _YARN | {"partial_rotary_factor": 0.5}},
    },
    "lfm2": {"layer_types": ["conv", _FULL, "conv", _FULL], "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL]},
    "llama4": {
        "text_config": {
            "interleave_moe_layer_step": 2,
            "use_qk_norm": True,
            "floor_scale": WINDOW,
            "num_experts_per_tok": 1,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "longcat_flash": {"zero_expert_type": "identity"},
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mellum": {"rope_parameters": {_SLIDING: _ROPE, _FULL: _YARN}},
    "mimo_v2_flash": {
        "moe_layer_freq": [0, 1, 1, 1],
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": True,
    },
    "minicpm3": {"rope_scaling": {"type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4}},
    "minimax_m3_vl": {
        "text_config": {
            "dense_intermediate_size": 96,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": [_FULL, "sparse", _FULL, "sparse"],
            "index_block_size": 8,
            "index_topk_blocks": 2,
        }
    },
    "ministral3": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "mistral4": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "muse_glimmer": {"output_multiplier": 1.0},
    "muse_spark": {
        "text_config": {
            "rope_parameters": _ROPE,
            "layer_rope_theta": [10_000.0, 0.0, 10_000.0, 0.0],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.2,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "E", "-"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", _FULL] * 2, "linear_allow_neg_eigval": True},
    "openelm": {
        "num_query_heads": [4, 4, 2, 2],
        "num_kv_heads": [2, 4, 1, 2],
        "ffn_multipliers": [1.0, 1.5, 2.0, 1.0],
        "ffn_dim_divisor": 8,
    },
    # It overwrites logits at fixed token ids up to 100351, beyond the end of an array that is smaller.
    "phi3small": {
        "vocab_size": 100352,
        "dense_attention_every_n_layers": 2,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
        "mup_width_multiplier": 1.0,
    },
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512}],
        "text_config": {"intermediate_size": 512},
    },
    "qwen3_5": {
        "text_config": {"num_experts": 0, "rope_parameters": _ROPE | {"type": "default", "partial_rotary_factor": 0.5}}
    },
    "qwen3_5_moe": {"text_config": {"num_experts": 4}},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "smollm3": {"layer_types": [_FULL] * LAYERS},
    "spark2_5": {"rope_parameters": {_SLIDING: _ROPE, _FULL: _YARN}},
    "step3p5": {
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 1},
        "moe_layers_enum": "1,2,3",
    },
}
"""What is particular to a module, as its config.json would have it."""
