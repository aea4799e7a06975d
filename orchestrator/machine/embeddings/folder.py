"""The folder of an embedding model, with the parts that sentence-transformers keeps in folders of their own."""

from pathlib import Path

import msgspec

from orchestrator.machine.models.checkpoints import hub_file, resolve
from orchestrator.machine.progress import OnProgress
from protocol.errors import InputError

_FILES = {"Pooling": ("config.json",), "Dense": ("config.json", "model.safetensors")}
"""Of parts that change the vectors, by the last word of their type."""


class _Part(msgspec.Struct):
    type: str
    path: str = ""


def embedding_folder(name: str, on_progress: OnProgress) -> Path:
    """Of the embedding model `name`, a folder or a Hugging Face id. Raises InputError for what can't be had, also for
    one of its parts: without them its vectors would be others."""
    folder = resolve(name, "target", on_progress)
    for file in _parts(folder):
        if (folder / file).is_file():
            continue
        if Path(name).expanduser().exists():
            raise InputError(f"{folder} lacks {file}, which its modules.json names: download the model again.")
        # A snapshot's folder has the name of its revision: parts of another one must not mix with it.
        hub_file(name, file, folder.name)
    return folder


def _parts(folder: Path) -> list[str]:
    """Files in subfolders that `modules.json` asks for."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        parts = msgspec.json.decode(file.read_bytes(), type=list[_Part])
    except msgspec.DecodeError as error:
        raise InputError(f"{file} is broken ({error}): download the model again.") from error
    named = ((part.path, files) for part in parts if (files := _FILES.get(part.type.rpartition(".")[2])))
    return [f"{path}/{each}" for path, files in named for each in files if path.replace("_", "").isalnum()]
