"""Folders of tiny random MTP heads in their published forms, of each architecture that has any."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.models.architectures import configuration, tiny

WIDTH, VOCABULARY, LAYERS = 64, 96, 4
_QWEN = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "fc": "fc", "norm": "norm"}
_DEEPSEEK = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
ARCHITECTURES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe")
EMBEDDING = mx.random.normal((VOCABULARY, WIDTH), key=mx.random.key(1))
HEAD = mx.random.normal((VOCABULARY, WIDTH), key=mx.random.key(2)) * 0.1


def mtp_beside() -> dict[str, Any]:
    """The tensors beside the decoder layer, by our names."""
    mx.random.seed(7)
    norms = {f"{name}.weight": 1.0 + 0.1 * mx.random.normal((WIDTH,)) for name in _QWEN if name != "fc"}
    return norms | {"fc.weight": 0.1 * mx.random.normal((WIDTH, 2 * WIDTH))}


def mtp_layer(name: str) -> Any:
    """The last layer of a tiny model: full attention, and experts where the architecture has any."""
    model = tiny(name)
    return getattr(model, "language_model", model).model.layers[-1]


def _published(name: str, layer: Any) -> dict[str, Any]:
    """The decoder layer's tensors as the original checkpoint has them."""
    flat: Any = dict(tree_flatten(layer.parameters()))
    stored = {}
    for key, values in flat.items():
        if "switch_mlp" in key and name == "qwen3_5_moe":
            continue
        if "switch_mlp" in key:
            projection = key.split(".")[-2]
            stored |= {f"mlp.experts.{number}.{projection}.weight": each for number, each in enumerate(values)}
        elif "embed_q" not in key and "unembed_out" not in key:
            stored[key] = values - 1.0 if name.startswith("qwen") and "norm" in key else values
    if name == "qwen3_5_moe":
        pair = [flat[f"mlp.switch_mlp.{side}_proj.weight"] for side in ("gate", "up")]
        stored["mlp.experts.gate_up_proj"] = mx.concatenate(pair, axis=-2)
        stored["mlp.experts.down_proj"] = flat["mlp.switch_mlp.down_proj.weight"]
    if name == "deepseek_v3":
        keys, values = flat["self_attn.embed_q.weight"].swapaxes(-1, -2), flat["self_attn.unembed_out.weight"]
        stored["self_attn.kv_b_proj.weight"] = mx.concatenate([keys, values], axis=1).reshape(-1, keys.shape[-1])
    return stored


def mtp_config(name: str) -> dict[str, Any]:
    config = configuration(name)
    number = "mtp_num_hidden_layers" if name.startswith("qwen") else "num_nextn_predict_layers"
    config.get("text_config", config)[number] = 1
    return config


def write_mtp(folder: Path, name: str) -> Path:
    qwen = name.startswith("qwen")
    prefix, names = ("mtp", _QWEN) if qwen else (f"model.layers.{LAYERS}", _DEEPSEEK)
    inner = f"{prefix}.layers.0" if qwen else prefix
    weights = {f"{inner}.{key}": values for key, values in _published(name, mtp_layer(name)).items()}
    for key, values in mtp_beside().items():
        published = f"{prefix}.{names[key.removesuffix('.weight')]}.weight"
        weights[published] = values - 1.0 if qwen and values.ndim == 1 else values
    weights["model.embed_tokens.weight"] = EMBEDDING
    (folder / "config.json").write_text(json.dumps(mtp_config(name)))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
