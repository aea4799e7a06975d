"""GGUF files to folders that mlx-lm reads. Imports no MLX.

`container` reads the file, `architectures` names its tensors, `weights` packs them, `folder` writes the tokenizer's
files and puts all of it together. Here is what others know of them who convert none: the names of a model's files, and
what a folder was converted from.
"""

import re
from pathlib import Path

import msgspec

from protocol.contracts.model_folder import ModelFolder

CONVERSION = "conversion.json"
"""Beside the model that was converted: a `Conversion`."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all parts of the model of which a file of this name is one, as llama.cpp's `gguf-split` gives them;
    only itself for a whole model."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


class Again(msgspec.Struct, frozen=True):
    """Weights of one type that MLX has no form for, so that they were quantised again."""

    bytes: int
    """In the folder."""
    bits: int
    off: float = 0.0
    """How far they are off: the root mean square, of that of the weights. 0 while the conversion runs."""


class Conversion(msgspec.Struct, frozen=True):
    """A model's file and its folder, with the weights' bytes."""

    file: str
    file_bytes: int
    bytes: int
    again: dict[str, Again]
    """By GGUF's name of the type."""

    @property
    def text(self) -> str:
        """For users, without a full stop."""
        types = (
            f"{kind} in {each.bits} bits" + (f", off by {each.off:.2%}" if each.off else "")
            for kind, each in self.again.items()
        )
        again = sum(each.bytes for each in self.again.values())
        quantized = f", of which {again / 1e9:.2f} GB are quantised again ({'; '.join(types)})" if again else ""
        return f"{self.file} ({self.file_bytes / 1e9:.2f} GB) to {self.bytes / 1e9:.2f} GB{quantized}"


def conversion_of(folder: Path) -> Conversion | None:
    """What the folder was converted from; None for another one. Raises InputError for a file that can't be read."""
    found = ModelFolder(folder).settings(CONVERSION)
    return msgspec.convert(found, Conversion) if found else None
