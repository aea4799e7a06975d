"""Estimates the memory that a pair of models takes, and how much of the machine's a pair may take."""

from collections.abc import Iterable
from pathlib import Path

from orchestrator.machine.models.checkpoints import weight_bytes

USABLE = 0.75
"""Share of the memory that a pair may use: about what macOS gives the GPU."""
KV_BYTES = 1 << 30
"""For the KV of some thousand tokens, and the processes."""


def fitting(weights: float, available: int) -> bool:
    """Whether models with weights of so many bytes fit. `available`: the machine's memory in bytes."""
    return weights + KV_BYTES <= USABLE * available


def needed(folders: Iterable[Path]) -> int:
    """Bytes that a pipeline with the models in these folders takes."""
    return sum(map(weight_bytes, folders)) + KV_BYTES
