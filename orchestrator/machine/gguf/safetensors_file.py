"""Writes a safetensors file piece by piece, so that a model needs not fit into memory.

The form: the header's length in 8 bytes, JSON with each array's format, shape and place, then the bytes.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.machine.gguf.weights import Part

_SIZES = {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 8


def write_safetensors(file: Path, parts: Sequence[Part], on_bytes: Callable[[int, int], None]) -> None:
    """`on_bytes` gets how many bytes of how many are written. Raises OSError if they can't be."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    total = 0
    for part in parts:
        size = math.prod(part.shape) * _SIZES[part.format]
        entries[part.name] = {"dtype": part.format, "shape": part.shape, "data_offsets": (total, total + size)}
        total += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    written = 0
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for part in parts:
            for chunk in part.chunks():
                out.write(chunk.data)
                written += chunk.nbytes
                on_bytes(written, total)
    assert written == total, f"{written} bytes instead of {total}"
