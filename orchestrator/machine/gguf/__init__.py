"""GGUF files to folders that mlx-lm reads. Imports no MLX.

`container` reads the file, `architectures` names its tensors, `weights` packs them, `folder` writes the tokenizer's
files and puts all of it together. Here are the names of a model's files, for those who convert none.
"""

import re

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all parts of the model of which a file of this name is one, as llama.cpp's `gguf-split` gives them;
    only itself for a whole model."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]
