"""Folders of tiny random EAGLE-3 drafters, in the form of each published family."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

WIDTH, TARGET_WIDTH, HEADS, KV_HEADS, SIZE, INNER, VOCABULARY = 8, 8, 4, 2, 4, 12, 40
HEAD_TOKENS = (1, 4, 5, 9, 17, 22, 30, 39)
_ATTENTION = {"q_proj": HEADS * SIZE, "k_proj": KV_HEADS * SIZE, "v_proj": KV_HEADS * SIZE}


def tensors(
    added: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    *,
    outputs: int = 3,
    seed: int = 0,
    head: int = len(HEAD_TOKENS),
) -> dict[str, Any]:
    """By SafeAILab's names; `added` are the shapes of further ones."""
    mx.random.seed(seed)
    shapes = {
        "fc.weight": (WIDTH, outputs * TARGET_WIDTH),
        **{f"midlayer.self_attn.{name}.weight": (rows, 2 * WIDTH) for name, rows in _ATTENTION.items()},
        "midlayer.self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.up_proj.weight": (INNER, WIDTH),
        "midlayer.mlp.down_proj.weight": (WIDTH, INNER),
        "midlayer.input_layernorm.weight": (WIDTH,),
        "midlayer.hidden_norm.weight": (WIDTH,),
        "midlayer.post_attention_layernorm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (head, WIDTH),
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        **added,
    }
    return {name: 0.3 + mx.random.normal(shape) * 0.6 for name, shape in shapes.items()}


def vocabulary_map() -> dict[str, Any]:
    chosen = mx.array([token in HEAD_TOKENS for token in range(VOCABULARY)])
    offsets = mx.array([token - column for column, token in enumerate(HEAD_TOKENS)], dtype=mx.int64)
    return {"d2t": offsets, "t2d": chosen}


def layer_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": 512,
    } | changes


def write(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def safe_ai_lab(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """With a head of `HEAD_TOKENS`."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(HEAD_TOKENS),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True},
    }
    return write(folder, layer_config() | config | changes, tensors(seed=seed) | vocabulary_map())


def plain_layer(number: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a further decoder layer."""
    shapes = {
        **{f"self_attn.{name}.weight": (rows, WIDTH) for name, rows in _ATTENTION.items()},
        "self_attn.o_proj.weight": (WIDTH, HEADS * SIZE),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    return {f"layers.{number}.{name}": shape for name, shape in shapes.items()}


def several_layers(folder: Path, layers: int = 3, **changes: Any) -> Path:
    """As speculators writes them."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(HEAD_TOKENS),
        "transformer_layer_config": layer_config(num_hidden_layers=layers),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    added: dict[str, tuple[int, ...]] = {}
    for number in range(1, layers):
        added |= plain_layer(number)
    if changes.get("speculators_model_type") == "peagle":
        added["mask_hidden"] = (1, 1, 3 * TARGET_WIDTH)
    named = {name.replace("midlayer.", "layers.0."): values for name, values in tensors(added).items()}
    return write(folder, config | changes, named | vocabulary_map())


MASK_TOKEN, DEPTHS = 38, 4


def peagle(folder: Path) -> Path:
    """P-EAGLE as speculators writes it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTHS}
    return several_layers(
        folder,
        2,
        architectures=["PEagleSpeculator"],
        speculators_model_type="peagle",
        mask_token_id=MASK_TOKEN,
        speculators_config={"algorithm": "peagle", "proposal_methods": [proposal]},
    )


def speculators(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """The same weights under the other names, with the same outputs in the other numbers."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(HEAD_TOKENS),
        "transformer_layer_config": layer_config(),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    named = {name.replace("midlayer.", "layers.0."): values for name, values in tensors(seed=seed).items()}
    return write(folder, config | changes, named | vocabulary_map())


def deep_spec(folder: Path, seed: int = 0) -> Path:
    """Five outputs, the whole vocabulary, queries and keys normed a head."""
    config = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 3, 4], "num_target_layers": 6}
    norms = {f"midlayer.self_attn.{name}.weight": (SIZE,) for name in ("q_norm", "k_norm")}
    weights = tensors(norms, outputs=5, seed=seed, head=VOCABULARY)
    named = {name.replace("midlayer.", "layers.0."): values for name, values in weights.items()}
    return write(folder, layer_config(model_type="qwen3") | config, named)
