"""How many bytes of weights a forward of one token reads, by the headers of a checkpoint. Loads no weights."""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orchestrator.machine.pairs.recommended_pairs import PROCESSOR_BITS
from protocol.contracts.head_tokens import HEAD_TOKENS

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SCALES, _BIASES = ".scales", ".biases"


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    stored: int
    """Bytes in the file."""


def weights_read(folder: Path, on_processor: bool, first_layers: int | None = None) -> int:
    """Bytes that one forward of a dense model reads; all experts of a mixture are counted.

    A processor reads float32, a GPU what is stored. Of the embedding a forward reads one row, unless it is also the
    head. `first_layers`: so many layers alone, without embedding and head. Raises OSError or ValueError for a folder
    that holds no such model.
    """
    config = json.loads((folder / "config.json").read_bytes())
    tensors = list(_tensors(folder))
    scales = {tensor.name.removesuffix(_SCALES): tensor for tensor in tensors if tensor.name.endswith(_SCALES)}
    tied = not any(_HEAD in tensor.name for tensor in tensors)
    read = 0.0
    for tensor in tensors:
        if first_layers is not None and _layer(tensor) >= first_layers:
            continue
        size = _unpacked(tensor, scales, config.get("quantization") or {}) if on_processor else tensor.stored
        read += size * _share_of_rows(tensor, tied, folder)
    return round(read)


def _layer(tensor: _Tensor) -> float:
    """Its number; infinity for what belongs to no layer."""
    found = _LAYER.search(tensor.name)
    return math.inf if found is None else int(found[1])


def _tensors(folder: Path) -> Iterator[_Tensor]:
    """The header of a safetensors file: 8 bytes with its length, then JSON."""
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            header: dict[str, Any] = json.loads(content.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield _Tensor(name, tuple(entry["shape"]), end - begin)


def _unpacked(tensor: _Tensor, scales: Mapping[str, _Tensor], quantization: Mapping[str, Any]) -> int:
    """Bytes of the weights that the tensor stands for, unpacked; a scale stands for a group of weights."""
    module = tensor.name.removesuffix(".weight")
    if tensor.name.endswith((_SCALES, _BIASES)) and tensor.name.rpartition(".")[0] in scales:
        return 0
    if module not in scales or module == tensor.name:
        return math.prod(tensor.shape) * PROCESSOR_BITS // 8
    own = quantization.get(module)
    group = (own if isinstance(own, dict) else quantization)["group_size"]
    return math.prod(scales[module].shape) * group * PROCESSOR_BITS // 8


def _share_of_rows(tensor: _Tensor, tied: bool, folder: Path) -> float:
    """Of a tensor's rows; an embedding and a head have a row a token of the vocabulary."""
    if _EMBEDDING in tensor.name and not tied:
        return 1 / tensor.shape[0]
    if _EMBEDDING not in tensor.name and _HEAD not in tensor.name:
        return 1.0
    return _head_rows(folder, tensor.shape[0]) / tensor.shape[0]


def _head_rows(folder: Path, vocabulary: int) -> int:
    file = folder / HEAD_TOKENS
    return len(np.load(file, allow_pickle=False)) if file.exists() else vocabulary
