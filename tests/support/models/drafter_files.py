"""Tiny random trained drafters in the published formats: config.json, and tensors by name and shape.

Names and shapes are those of SafeAILab/EAGLE (cnets.py), vllm-project/speculators, deepseek-ai/DeepSpec, z-lab/dflash,
apple/ml-recurrent-drafter, and the MTP tensors of Qwen3-Next and DeepSeek-V3.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WIDTH, VOCABULARY, DRAFTED, LAYERS = 16, 40, 24, 8
_INNER, HEADS, KV_HEADS, HEAD = 24, 4, 2, 4
RANK = 3

Format = tuple[dict[str, Any], dict[str, tuple[int, ...]]]
"""A config, and tensors by name."""

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": _INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
}


def layer(prefix: str, read: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """A decoder layer whose attention reads `read` numbers."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD, read),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD, read),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD, read),
        f"{prefix}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        f"{prefix}.mlp.gate_proj.weight": (_INNER, WIDTH),
        f"{prefix}.mlp.up_proj.weight": (_INNER, WIDTH),
        f"{prefix}.mlp.down_proj.weight": (WIDTH, _INNER),
        f"{prefix}.input_layernorm.weight": (WIDTH,),
        f"{prefix}.post_attention_layernorm.weight": (WIDTH,),
    }


def eagle3_tensors(prefix: str, outputs: int, drafted: int = DRAFTED) -> dict[str, tuple[int, ...]]:
    tables = {"d2t": (drafted,), "t2d": (VOCABULARY,)} if drafted < VOCABULARY else {}
    return {
        "fc.weight": (WIDTH, outputs * WIDTH),
        **layer(prefix, 2 * WIDTH),
        f"{prefix}.hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (drafted, WIDTH),
        **tables,
    }


def safeailab() -> Format:
    return LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}, eagle3_tensors(
        "midlayer", 3
    )


def specforge() -> Format:
    config, tensors = safeailab()
    return config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, tensors


def speculators() -> Format:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFTED,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "target_hidden_size": None,
        "transformer_layer_config": LAYER,
    }
    return config, eagle3_tensors("layers.0", 3) | {"embed_tokens.weight": (VOCABULARY, WIDTH)}


def deepspec_eagle3() -> Format:
    config = LAYER | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_target_layers": LAYERS,
        "target_layer_ids": [1, 2, 3, 4, 5],
        "ttt_length": 7,
    }
    return config, eagle3_tensors("layers.0", 5, VOCABULARY) | {"embed_tokens.weight": (VOCABULARY, WIDTH)}


def _block_tensors(layers: int, outputs: int) -> dict[str, tuple[int, ...]]:
    tensors = {"fc.weight": (WIDTH, outputs * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for index in range(layers):
        tensors |= layer(f"layers.{index}")
        tensors |= {f"layers.{index}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    return tensors


def dflash() -> Format:
    config = LAYER | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": 8,
        "dflash_config": {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [1, 3, 5]},
    }
    return config, _block_tensors(2, 3)


def dspark() -> Format:
    config = LAYER | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": 7,
        "mask_token_id": VOCABULARY - 1,
        "num_anchors": 512,
        "target_layer_ids": [1, 3, 5],
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
    }
    tensors = _block_tensors(2, 3) | {
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "lm_head.weight": (VOCABULARY, WIDTH),
        "markov_head.markov_w1.weight": (VOCABULARY, RANK),
        "markov_head.markov_w2.weight": (VOCABULARY, RANK),
        "confidence_head.proj.weight": (1, WIDTH + RANK),
        "confidence_head.proj.bias": (1,),
    }
    return config, tensors


def specforge_dspark() -> Format:
    config, tensors = dspark()
    del config["num_anchors"]
    moved = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    inner = {"projector_type": "dspark"} | {name: config.pop(name) for name in moved}
    return config | {"architectures": ["DSparkDraftModel"], "dflash_config": inner}, tensors


def deepspec_dflash() -> Format:
    config, tensors = dspark()
    return config | {"markov_rank": 0}, {
        name: shape for name, shape in tensors.items() if "markov" not in name and "confidence" not in name
    }


def dflash2() -> Format:
    """As z-lab publishes it: `block_size` nested, all layers with windows that are not causal."""
    config, tensors = dflash()
    inner = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": 5}
    config["dflash_config"] |= inner | {"block_size": config.pop("block_size")}
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32, "is_causal": False}
    for layer in range(2):
        for place in ("attention_conv", "mlp_conv"):
            tensors |= {
                f"layers.{layer}.{place}.base_kernel": (2, 2, WIDTH),
                f"layers.{layer}.{place}.kernel_projection.weight": (WIDTH, WIDTH),
            }
    tensors |= {f"candidate_selector.{name}_codebook": (VOCABULARY, RANK) for name in ("predecessor", "successor")}
    tensors["candidate_selector.hidden_projection.weight"] = (RANK, WIDTH)
    return config | windows | {"architectures": ["DFlash2DraftModel"]}, tensors


_MOVED = (
    *("block_size", "mask_token_id", "markov_rank", "markov_head_type"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
)
_NESTED = (*LAYER, "layer_types", "sliding_window", "attention_bias", "hidden_act")


def speculators_config(kind: str, config: dict[str, Any], drafted: int) -> dict[str, Any]:
    """The config.json of a block drafter as vllm-project/speculators saves it."""
    config = config | config.get("dflash_config", {})
    return {name: config[name] for name in _MOVED if name in config} | {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "draft_vocab_size": drafted,
        "aux_hidden_state_layer_ids": [number + 1 for number in config["target_layer_ids"]],
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": config.get("is_causal") is False,
        "target_hidden_size": None,
        "transformer_layer_config": {name: config[name] for name in _NESTED if name in config},
    }


def _packed(kind: str, given: Format) -> Format:
    """In speculators' packaging, with a reduced head unless there is a selector."""
    config, tensors = given
    drafted = VOCABULARY if kind == "dflash2" else DRAFTED
    tensors = tensors | {"embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (drafted, WIDTH)}
    if drafted < VOCABULARY:
        tensors |= {"d2t": (drafted,), "t2d": (VOCABULARY,)}
    if kind == "dspark":
        tensors["markov_head.markov_w2.weight"] = (drafted, RANK)
    return speculators_config(kind, config, drafted), tensors


def speculators_layers() -> Format:
    """EAGLE-3 of three layers."""
    config, tensors = speculators()
    config["transformer_layer_config"] = config["transformer_layer_config"] | {"num_hidden_layers": 3}
    return config, tensors | layer("layers.1") | layer("layers.2")


def speculators_peagle() -> Format:
    config, tensors = speculators_layers()
    own = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": VOCABULARY - 1,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}]},
    }
    return config | own, tensors | {"mask_hidden": (1, 1, 3 * WIDTH)}


def qwen_mtp() -> Format:
    config = LAYER | {"model_type": "qwen3_next", "num_hidden_layers": LAYERS, "mtp_num_hidden_layers": 1}
    tensors = {
        "mtp.fc.weight": (WIDTH, 2 * WIDTH),
        "mtp.pre_fc_norm_embedding.weight": (WIDTH,),
        "mtp.pre_fc_norm_hidden.weight": (WIDTH,),
        **layer("mtp.layers.0"),
        "mtp.norm.weight": (WIDTH,),
    }
    return config, tensors


def deepseek_mtp() -> Format:
    config = LAYER | {"model_type": "glm4_moe", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    prefix = f"model.layers.{LAYERS}"
    tensors = {
        f"{prefix}.eh_proj.weight": (WIDTH, 2 * WIDTH),
        f"{prefix}.enorm.weight": (WIDTH,),
        f"{prefix}.hnorm.weight": (WIDTH,),
        **layer(prefix),
        f"{prefix}.shared_head.norm.weight": (WIDTH,),
        f"{prefix}.shared_head.head.weight": (VOCABULARY, WIDTH),
        f"{prefix}.embed_tokens.weight": (VOCABULARY, WIDTH),
    }
    return config, tensors


FORMATS: dict[str, Callable[[], Format]] = {
    each.__name__: each
    for each in (
        *(safeailab, specforge, speculators, deepspec_eagle3, dflash, dspark, specforge_dspark, deepspec_dflash),
        *(speculators_layers, speculators_peagle),
        *(dflash2, qwen_mtp, deepseek_mtp),
    )
} | {f"speculators_{form.__name__}": partial(_packed, form.__name__, form()) for form in (dflash, dspark, dflash2)}


def write(folder: Path, given: Format, seed: int = 0) -> Path:
    """A folder with this config and random tensors."""
    config, tensors = given
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    arrays = {name: _array(random, name, shape) for name, shape in tensors.items()}
    if arrays:
        save_file(arrays, folder / "model.safetensors")
    return folder


def _array(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    if name == "d2t" and len(shape) == 1:
        # Token i of the draft is the target's token i + d2t[i]: every token but some.
        chosen = np.sort(random.permutation(VOCABULARY)[: shape[0]])
        return chosen - np.arange(shape[0])
    if name == "t2d":
        return np.zeros(shape, np.bool_)
    return random.normal(size=shape).astype(np.float16)
