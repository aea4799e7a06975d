"""Models that other programs have already put on this disk. Copies nothing and opens no weights."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.models.checkpoints import complete, gguf_files

_MODEL_LAYER = "application/vnd.ollama.image.model"
"""The layer of an Ollama manifest that is a GGUF file."""
_LEAST_BYTES = 1 << 20
"""Smaller files are vocabularies or pointers."""


class LocalModel(NamedTuple):
    """`target` is what --target and --draft take."""

    origin: str
    name: str
    target: str
    bytes: int


def local_models() -> list[LocalModel]:
    """All that are found, by program and name. Folders that can't be read are passed over."""
    found = [*_hugging_face(), *_lm_studio(), *_ollama()]
    return sorted(set(found))


def _hugging_face() -> Iterator[LocalModel]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for repository in _folders(Path(HF_HUB_CACHE), "models--*--*"):
        id = repository.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in _folders(repository / "snapshots", "*"):
            if complete(snapshot):
                yield LocalModel("Hugging Face", id, id, _size(snapshot.glob("model*.safetensors")))
            for file in _large(gguf_files(snapshot)):
                yield LocalModel("Hugging Face", f"{id}:{file.name}", f"{id}:{file.name}", _size([file]))


def _lm_studio() -> Iterator[LocalModel]:
    for root in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for folder in _folders(root, "*/*"):
            name = f"{folder.parent.name}/{folder.name}"
            if complete(folder):
                yield LocalModel("LM Studio", name, str(folder), _size(folder.glob("model*.safetensors")))
            for file in _large(gguf_files(folder)):
                yield LocalModel("LM Studio", f"{name}/{file.name}", str(file), _size([file]))


def _ollama() -> Iterator[LocalModel]:
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    manifests = root / "manifests"
    for manifest in sorted(file for file in manifests.glob("*/*/*/*") if file.is_file()):
        _, owner, model, tag = manifest.relative_to(manifests).parts
        name = f"{model}:{tag}" if owner == "library" else f"{owner}/{model}:{tag}"
        for digest in _digests(manifest):
            blob = root / "blobs" / digest.replace(":", "-")
            for file in _large([blob]):
                yield LocalModel("Ollama", name, str(file), _size([file]))


def _digests(manifest: Path) -> list[str]:
    """Of the models in an Ollama manifest; none if it can't be read."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        return [str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _folders(parent: Path, pattern: str) -> list[Path]:
    return sorted(path for path in parent.glob(pattern) if path.is_dir())


def _large(files: list[Path]) -> list[Path]:
    return [file for file in files if file.is_file() and file.stat().st_size >= _LEAST_BYTES]


def _size(files: Iterator[Path] | list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
