"""Names for the array types that the Core ML side passes around."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Half: TypeAlias = npt.NDArray[np.float16]
Single: TypeAlias = npt.NDArray[np.float32]
