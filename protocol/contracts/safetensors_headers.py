"""The names, types and shapes of the tensors in a model's folder, from the headers of its files. Reads no tensor."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.errors import InputError

_MOST_HEADER = 100 << 20
"""As in the safetensors library."""
_POINTER = b"version "
"""How a file begins that stands for a large one in a Git repository."""


class Tensor(NamedTuple):
    """`type`: as the format names it, such as F16."""

    type: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int] = (0, 0)


def tensors_in(folder: Path, files: str = "*.safetensors") -> dict[str, Tensor]:
    """Every tensor of the folder's `files`, by name. Raises InputError for a file that is damaged."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob(files)):
        found.update(tensors_of(file))
    return found


def tensors_of(file: Path) -> Mapping[str, Tensor]:
    """Every tensor of one file, by name. Raises InputError if it is damaged or cut."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(min(length, _MOST_HEADER))
        if length.to_bytes(8, "little") == _POINTER:
            raise InputError(f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder.")
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        known = msgspec.convert(entries, dict[str, _Entry])
    except OSError as error:
        raise InputError(f"{file} can't be read ({error.strerror}): check its permissions.") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} has no whole header: download it again.") from error
    if any(number < 0 for entry in known.values() for number in entry.shape):
        raise InputError(f"{file} states a tensor of negative size: download it again.")
    whole = 8 + length + max((entry.data_offsets[1] for entry in known.values()), default=0)
    if file.stat().st_size < whole:
        raise InputError(f"{file} is cut: it has {file.stat().st_size:,} of {whole:,} bytes. Download it again.")
    return {name: Tensor(entry.dtype, entry.shape) for name, entry in known.items()}
