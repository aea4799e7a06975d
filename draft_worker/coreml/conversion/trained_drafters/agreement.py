"""Compares each function of a trained drafter's package with the drafter in MLX, on the target's own features.

The executor stands for the device: what is compared is the graph and its rounding to fp16.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.converted import Converted
from protocol.contracts.coreml.conversion import WeightKind
from protocol.errors import InputError

_LIMITS: Mapping[WeightKind, float] = {"fp16": 0.05, "int8": 0.25, "4bit": 1.0}
"""Largest deviation that rounding explains, of activations and of weights in fewer bits. Unrelated results have 1.4."""


class Pair(NamedTuple):
    """Results of a function of the package, and of the drafter in MLX."""

    function: str
    got: Array
    expected: Array

    @property
    def deviation(self) -> float:
        """Root mean square of the differences, in standard deviations of the expected results."""
        difference = self.got.astype(np.float64) - self.expected
        deviation = np.sqrt(np.mean(np.square(difference))) / max(float(np.std(self.expected)), 1e-12)
        return float(deviation) if np.isfinite(deviation) else np.inf


Comparison: TypeAlias = Callable[[Converted], Iterator[Pair]]


def require_agreement(folder: Path, drafter: Path, compare: Comparison) -> None:
    """Raises InputError if a function of the package in `folder` does not compute what `drafter` does."""
    converted = Converted.open(folder)
    limit = _LIMITS[converted.package.weights]
    for pair in compare(converted):
        if not pair.deviation <= limit:
            raise InputError(
                f"The package made of {drafter} was discarded: its function {pair.function} deviates from the drafter "
                f"by {pair.deviation:.2g} standard deviations, and {limit} is the most that rounding to "
                f"{converted.package.weights} explains. Use the drafter as it is, without Core ML."
            )
