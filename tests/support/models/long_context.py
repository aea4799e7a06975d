"""A tiny random model with room for an agent's rules and tools, and with another model's tokenizer."""

import json
from pathlib import Path

from tests.support.models.tiny_models import network, write_model

CONTEXT = 65_536
_END_SCALE = 3.0
"""About one token in 50 is an end at a temperature of 0.7. Greedy text may run in circles."""


def write_long_context(source: Path, folder: Path) -> Path:
    """Makes `folder`, with links to the files of `source` other than the configuration and the weights."""
    config = json.loads((source / "config.json").read_text())
    tokens = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    model = network(vocab_size=tokens["vocab_size"], max_position_embeddings=CONTEXT, rope_theta=1e6)
    model.lm_head.weight[tokens["eos_token_id"]] *= _END_SCALE
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", "model.safetensors.index.json"):
            (folder / file.name).symlink_to(file)
    return write_model(folder, model, **tokens)
