"""In how many bits a target holds its keys and values, and what that means for their exchange."""

from pathlib import Path
from typing import Literal, TypeAlias

from protocol.contracts.model_folder import ModelFolder

KvBits: TypeAlias = Literal[16, 8, 4]
UNQUANTIZED: KvBits = 16
"""As the model computes them, whatever its element type."""


def kv_fingerprint(folder: Path, bits: KvBits) -> str:
    """Of keys and values that fit together: the model's fingerprint, and the bits if they are quantized."""
    model = ModelFolder(folder).fingerprint
    return model if bits == UNQUANTIZED else f"{model} in {bits} bits"
