"""Names of the array types of the Core ML side."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Half: TypeAlias = npt.NDArray[np.float16]
Single: TypeAlias = npt.NDArray[np.float32]
Slots: TypeAlias = npt.NDArray[np.intp]
"""Slots of a cache, or a number for each slot."""
