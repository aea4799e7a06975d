"""The memory that weights take once they are loaded, from the headers of their files. Reads no tensor.

On a processor every weight is unpacked to float32 (`protocol.inference.language_model`).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.contracts.drafters.description import Drafter
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.safetensors_headers import Tensor, tensors_in

PROCESSOR_BYTES = 4
"""Of each weight on a processor."""
_BITS = re.compile(r"[A-Z]+(\d+)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head|wte)\.")
"""The target's embedding and head."""
_PARAMETER_BYTES = 2
"""Of an MTP head in its target's own checkpoint, in fp16 or bf16."""


def loaded_weights(folder: Path, on_processor: bool, ranks: int = 1) -> int:
    """Bytes of a language model's weights in memory, those of one of so many ranks among which it is divided.

    Raises InputError for a file that is damaged.
    """
    tensors = tensors_in(folder, "model*.safetensors")
    # mlx-lm divides layers alone: each rank has the whole embedding and head.
    shared = {name: tensor for name, tensor in tensors.items() if _SHARED.search(name)}
    whole = _loaded(folder, shared, on_processor)
    return whole + (_loaded(folder, tensors, on_processor) - whole) // ranks


def loaded_drafter(folder: Path, target: Path, on_processor: bool) -> int:
    """Bytes of the weights that a trained drafter's process holds: its own, and what it takes of the target's.

    Raises InputError for a folder that can't be read.
    """
    drafter = read_drafter(folder)
    if drafter is not None:
        own = _loaded(folder, tensors_in(folder), on_processor)
    else:
        drafter = read_drafter(folder, with_own_head=True)
        size = PROCESSOR_BYTES if on_processor else _PARAMETER_BYTES
        own = 0 if drafter is None else drafter.parameters * size
    tensors = tensors_in(target, "model*.safetensors")
    taken = {name: tensor for name, tensor in tensors.items() if _taken(name, drafter)}
    return own + _loaded(target, taken, on_processor)


def _taken(name: str, drafter: Drafter | None) -> bool:
    """Whether the drafter uses this tensor of its target."""
    if drafter is None or drafter.kind != "exit":
        return _SHARED.search(name) is not None
    layer = _LAYER.search(name)
    return layer is None or int(layer[1]) < drafter.layers


def _loaded(folder: Path, tensors: Mapping[str, Tensor], on_processor: bool) -> int:
    if not on_processor:
        return sum(map(_stored, tensors.values()))
    bits = _quantization_bits(folder)
    return sum(_unpacked(name, tensor, tensors, bits) for name, tensor in tensors.items())


def _unpacked(name: str, tensor: Tensor, tensors: Mapping[str, Tensor], bits: Mapping[str, int]) -> int:
    """Bytes in float32. Scales and biases of quantized weights are gone then."""
    module, _, kind = name.rpartition(".")
    if f"{module}.scales" not in tensors:
        return tensor.elements * PROCESSOR_BYTES
    if kind != "weight":
        return 0
    return tensor.elements * 32 // max(1, bits.get(module, bits[""])) * PROCESSOR_BYTES


def _quantization_bits(folder: Path) -> Mapping[str, int]:
    """Bits of a quantized weight by its module's name; "": of all others."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        stated: Any = config.get("quantization") or config.get("quantization_config") or {}
        single = {name: each["bits"] for name, each in stated.items() if isinstance(each, dict) and "bits" in each}
        return {name: int(bits) for name, bits in single.items()} | {"": int(stated.get("bits", 4))}
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return {"": 4}


def _stored(tensor: Tensor) -> int:
    bits = _BITS.match(tensor.type)
    return tensor.elements * (int(bits[1]) if bits else 8) // 8
