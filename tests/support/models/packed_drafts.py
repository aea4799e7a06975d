"""A tiny target from a GGUF file, and a draft of its shape as it is trained and as it is shipped."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

from orchestrator.machine.drafts.shipped_drafts import CONFIG, EMBEDDING, LAYERS
from orchestrator.machine.gguf.folder import convert_gguf
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.speculation.successors import SUCCESSORS
from tests.support.models.gguf_files import SIZES, weights, write_gguf
from tests.support.models.tiny_models import network

HEAD = np.array([1, 5, 104, 105, 200, 263], np.int32)


def target(folder: Path) -> Path:
    """A model folder in 4 bits with an embedding in 8, as the default target is. Returns the folder."""
    folder.mkdir(parents=True)
    file = folder.with_suffix(".gguf")
    write_gguf(file, kinds={"token_embd": "Q8_0", "": "Q4_1"})
    convert_gguf(file, folder)
    return folder


def trained(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A draft of one layer in `folder`; returns its weights in fp16."""
    sizes = SIZES | {"num_hidden_layers": 1, "tie_word_embeddings": True} | changes
    found = {name: array.astype(np.float16) for name, array in weights(network("llama", 7, **sizes)).items()}
    folder.mkdir(parents=True)
    save_file(found, folder / "model.safetensors")
    np.save(folder / "head_tokens.npy", HEAD)
    fields = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(fields | sizes))
    return found


def pack(draft: Path, folder: Path) -> None:
    """Fill `folder` with the trained draft as it is shipped: layers in 8 bits, no embedding."""
    arrays: dict[str, mx.array] = {}
    loaded: Any = mx.load(str(draft / "model.safetensors"))
    for name, weight in loaded.items():
        module, matrix = name.removesuffix(".weight"), weight.ndim == 2
        if module != EMBEDDING:
            parts = mx.quantize(weight, group_size=32, bits=8) if matrix else (weight,)
            names = ("weight", "scales", "biases")
            arrays |= {f"{module}.{part}": each for part, each in zip(names, parts, strict=False)}
    mx.save_safetensors(str(folder / LAYERS), arrays)
    shutil.copyfile(draft / HEAD_TOKENS, folder / HEAD_TOKENS)
    (folder / SUCCESSORS).write_bytes(bytes(16))
    config = json.loads((draft / CONFIG).read_text()) | {"quantization": {"group_size": 32, "bits": 8}}
    (folder / CONFIG).write_text(json.dumps(config))


def packed(folder: Path, **changes: Any) -> Path:
    """The folder of such a draft as it is shipped."""
    draft = folder.with_name(f"{folder.name}-trained")
    trained(draft, **changes)
    folder.mkdir()
    pack(draft, folder)
    return folder
