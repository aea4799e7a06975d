"""The files with a model's weights, examined before any tensor is read: whole, complete, and each tensor once."""

import json
import re
from pathlib import Path

from protocol.contracts.safetensors_headers import Tensor, tensors_of
from protocol.errors import InputError

_PATTERN = "model*.safetensors"
"""Of mlx-lm and of Transformers."""
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_UNFINISHED = ("*.safetensors.part", "*.safetensors.aria2", "*.safetensors.crdownload", "*.safetensors.download")
"""What programs that fetch files leave beside or instead of them."""


def require_complete(folder: Path) -> None:
    """Raises InputError for an unfinished download, and for files that are missing or are no files. Opens none."""
    for file in sorted(folder.iterdir()):
        # A pipe would keep whoever opens it waiting for ever, whatever it stands for.
        special = file.exists() and not file.is_dir()
        if not file.is_file() and (special or file.suffix == ".safetensors"):
            raise InputError(f"{file} is not a regular file: download the model again.")
    unfinished = next((file.name for pattern in _UNFINISHED for file in sorted(folder.glob(pattern))), None)
    if unfinished is not None:
        raise InputError(f"The download of {folder} is unfinished ({unfinished}): download the model again.")
    missing = _missing(folder, _files(folder))
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} of its weight files, first {missing[0]}: download it again.")


def examined_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's weight files, by name, from their headers.

    Raises InputError for files that are not complete, for one that is cut, and for a tensor that is in two files.
    """
    require_complete(folder)
    found: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    for file in _files(folder):
        tensors = tensors_of(folder / file)
        twice = next((name for name in tensors if name in file_of), None)
        if twice is not None:
            raise InputError(
                f"{folder} has the tensor {twice} in both {file_of[twice]} and {file}: remove the file that does not "
                "belong to the model, or download it again into an empty folder."
            )
        found.update(tensors)
        file_of.update(dict.fromkeys(tensors, file))
    return found


def _files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob(_PATTERN))


def _missing(folder: Path, files: list[str]) -> list[str]:
    """Files that the index names; without one, that the names of the others tell."""
    named = set(_index(folder).values())
    if not named:
        for file in files:
            if part := _SHARD.fullmatch(file):
                named |= {f"{part[1]}-{place:05}-of-{part[3]}.safetensors" for place in range(1, int(part[3]) + 1)}
    return sorted(name for name in named if not (folder / name).is_file())


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty without an index."""
    index = folder / _INDEX
    if not index.is_file():
        return {}
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        return {str(tensor): str(file) for tensor, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index} is broken: download the model again.") from error
