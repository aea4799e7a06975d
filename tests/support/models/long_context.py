"""A tiny random model that reads as many tokens as an agent's rules and tools take, with another model's tokenizer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.models.tiny_models import network

CONTEXT = 65_536
_WEIGHTS = "model.safetensors"


def write_long_context(source: Path, folder: Path) -> Path:
    """Makes `folder`, with links to the files of `source` other than the configuration and the weights."""
    config = json.loads((source / "config.json").read_text())
    vocabulary = config["vocab_size"]
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "max_position_embeddings": CONTEXT, "rope_theta": 1e6}
    model = network(**sizes)
    # The greedy choice at about one position in 50, so that answers end.
    scale = mx.ones((vocabulary, 1)).at[mx.array(_ends(config))].add(1.0)
    model.lm_head.weight = model.lm_head.weight * scale
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", "model.safetensors.index.json"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps({**vars(model.args), **tokens}))
    mx.save_safetensors(str(folder / _WEIGHTS), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return folder


def _ends(config: dict[str, Any]) -> list[int]:
    ends = config["eos_token_id"]
    return ends if isinstance(ends, list) else [ends]
