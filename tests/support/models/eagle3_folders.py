"""Folders of tiny random EAGLE-3 drafters, all of whose inputs matter, in the form of each published family."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from tests.support.models import drafter_files
from tests.support.models.drafter_files import HEAD as SIZE
from tests.support.models.drafter_files import HEADS, KV_HEADS, VOCABULARY, WIDTH

__all__ = ["HEADS", "KV_HEADS", "SIZE", "VOCABULARY", "WIDTH"]
TARGET_WIDTH = WIDTH
HEAD_TOKENS = (1, 4, 5, 9, 17, 22, 30, 39)
MASK_TOKEN, DEPTHS = 38, 4


def tensors(
    added: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    *,
    outputs: int = 3,
    seed: int = 0,
    head: int = len(HEAD_TOKENS),
) -> dict[str, Any]:
    """By SafeAILab's names, without a map of the vocabulary; `added` are the shapes of further ones."""
    mx.random.seed(seed)
    shapes = drafter_files.eagle3_tensors("midlayer", outputs, head) | {"embed_tokens.weight": (VOCABULARY, WIDTH)}
    shapes = {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")} | dict(added)
    return {name: 0.3 + mx.random.normal(shape) * 0.6 for name, shape in shapes.items()}


def vocabulary_map() -> dict[str, Any]:
    chosen = mx.array([token in HEAD_TOKENS for token in range(VOCABULARY)])
    offsets = mx.array([token - column for column, token in enumerate(HEAD_TOKENS)], dtype=mx.int64)
    return {"d2t": offsets, "t2d": chosen}


def layer_config(**changes: Any) -> dict[str, Any]:
    return drafter_files.LAYER | {"rope_theta": 1000.0, "max_position_embeddings": 512} | changes


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


def speculators(folder: Path, seed: int = 0, layers: int = 1, **changes: Any) -> Path:
    """The same weights under the other names, with the same outputs in the other numbers."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(HEAD_TOKENS),
        "transformer_layer_config": layer_config(num_hidden_layers=layers),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    } | changes
    added: dict[str, tuple[int, ...]] = {}
    for number in range(1, layers):
        added |= drafter_files.layer(f"layers.{number}")
    if config["speculators_model_type"] == "peagle":
        added["mask_hidden"] = (1, 1, 3 * TARGET_WIDTH)
    return write(folder, config, _renamed(tensors(added, seed=seed)) | vocabulary_map())


def several_layers(folder: Path, **changes: Any) -> Path:
    return speculators(folder, layers=3, **changes)


def peagle(folder: Path) -> Path:
    """P-EAGLE as speculators writes it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTHS}
    own = drafter_files.speculators_peagle()[0] | {
        "mask_token_id": MASK_TOKEN,
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [proposal]},
    }
    names = ("architectures", "speculators_model_type", "mask_token_id", "speculators_config")
    return speculators(folder, layers=2, **{name: own[name] for name in names})


def deep_spec(folder: Path, seed: int = 0) -> Path:
    """Five outputs, the whole vocabulary, queries and keys normed a head."""
    config = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 3, 4], "num_target_layers": 6}
    norms = {f"midlayer.self_attn.{name}.weight": (SIZE,) for name in ("q_norm", "k_norm")}
    weights = _renamed(tensors(norms, outputs=5, seed=seed, head=VOCABULARY))
    return write(folder, layer_config(model_type="qwen3") | config, weights)


def _renamed(weights: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("midlayer.", "layers.0."): values for name, values in weights.items()}
