"""Estimates the memory that a pair of models takes, and how much of the machine's a pair may take."""

from pathlib import Path

USABLE = 0.75
"""Share of the memory that a pair may use: about what macOS gives the GPU."""
KV_BYTES = 1 << 30
"""For the KV of some thousand tokens, and the processes."""


def fitting(weights: float, available: int) -> bool:
    """Whether models with weights of so many bytes fit. `available`: the machine's memory in bytes."""
    return weights + KV_BYTES <= USABLE * available


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights in a model's folder."""
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
