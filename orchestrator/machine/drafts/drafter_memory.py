"""The memory that a trained drafter takes beside its target, from the headers of both. Reads no tensor."""

import re
from pathlib import Path

from protocol.contracts.drafters.description import Drafter
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.safetensors_headers import Tensor, tensors_in

_BITS = re.compile(r"[A-Z]+(\d+)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_SHARED = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head|wte)\.")
"""The target's embedding and head."""
_PARAMETER_BYTES = 2
"""Of an MTP head in its target's own checkpoint, in fp16 or bf16."""


def drafter_bytes(folder: Path, target: Path) -> int:
    """Bytes of the weights that the draft's process holds: the drafter's, and what it takes of the target's.

    Raises InputError for a folder that can't be read.
    """
    drafter = read_drafter(folder)
    if drafter is not None:
        own = sum(map(_bytes, tensors_in(folder).values()))
    else:
        drafter = read_drafter(folder, with_own_head=True)
        own = 0 if drafter is None else drafter.parameters * _PARAMETER_BYTES
    return own + sum(_bytes(tensor) for name, tensor in tensors_in(target).items() if _taken(name, drafter))


def _taken(name: str, drafter: Drafter | None) -> bool:
    """Whether the drafter uses this tensor of its target."""
    if drafter is None or drafter.kind != "exit":
        return _SHARED.search(name) is not None
    layer = _LAYER.search(name)
    return layer is None or int(layer[1]) < drafter.layers


def _bytes(tensor: Tensor) -> int:
    bits = _BITS.match(tensor.type)
    return tensor.elements * (int(bits[1]) if bits else 8) // 8
