"""What MLX would compute for an array that is not computed yet."""

import re
from pathlib import Path

import mlx.core as mx


def primitives(array: mx.array, folder: Path) -> list[str]:
    mx.export_to_dot(str(folder / "graph.dot"), array)
    return re.findall(r'label ?= ?"(\w+)"', (folder / "graph.dot").read_text())
