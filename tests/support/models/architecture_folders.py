"""A tiny model of any architecture as a folder on the disk, with the demo target's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support.models.architectures import configuration, tiny
from tests.support.paths import DEMO_TARGET


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Returns the folder, which then holds a model of the demo target's vocabulary; `changes` replace fields of its
    text model."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = json.loads((DEMO_TARGET / "config.json").read_text())
    changes = {"vocab_size": demo["vocab_size"]} | changes
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(tiny(name, **changes).parameters())))
    special = {key: demo[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(configuration(name, **changes) | special))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_TARGET / file, folder)
    return folder
