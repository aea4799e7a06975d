"""The parts that all functions of a package share: norms, projections, rotated heads. Knows no function as a whole."""

from typing import Any

import numpy as np

from draft_worker.coreml.conversion.weights import Constants
from draft_worker.coreml.package import Layer, Package, rotation_inputs
from draft_worker.coreml.toolchain import toolchain


class GraphParts:
    """Adds operations to the function that is being built, whose calls have `width` tokens."""

    def __init__(self, package: Package, constants: Constants, width: int) -> None:
        self._package = package
        self._shape = package.shape
        self._constants = constants
        self._width = width
        self._mb = toolchain().operations

    def _placeholders(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        types = toolchain().types
        return {
            name: self._mb.placeholder(shape=shape, dtype=types.fp16 if len(shape) == 4 else types.int32)
            for name, shape in shapes.items()
        }

    def _keys_values(self, name: str, layer: Layer, x: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """The keys and values of an attention for the normed states `x`: (1, key heads, L, head) each."""
        keys = self._turned(f"{name}.k", self._shape.key_heads, layer, x, inputs)
        values = self._heads(x, f"{name}.v_proj", self._shape.key_heads)
        return self._mb.transpose(x=keys, perm=[0, 1, 3, 2]), self._mb.transpose(x=values, perm=[0, 1, 3, 2])

    def _turned(self, name: str, heads: int, layer: Layer, x: Any, inputs: dict[str, Any]) -> Any:
        """Queries or keys with their norm and rotation: (1, heads, head, L)."""
        found = self._heads(x, f"{name}_proj", heads)
        if f"{name}_norm.weight" in self._constants:
            found = self._norm(found, f"{name}_norm.weight", axis=2)
        if layer.rotation is None:
            return found
        cosine, sine = (inputs[rotation] for rotation in rotation_inputs(layer.rotation))
        return self._rotate(found, cosine, sine)

    def _heads(self, x: Any, name: str, heads: int) -> Any:
        return self._mb.reshape(x=self._project(x, name), shape=(1, heads, self._shape.head, self._width))

    def _rotate(self, x: Any, cosine: Any, sine: Any) -> Any:
        first, second = self._mb.split(x=x, num_splits=2, axis=2)
        crossed = self._mb.concat(values=[self._mb.mul(x=second, y=np.float16(-1)), first], axis=2)
        return self._mb.add(x=self._mb.mul(x=x, y=cosine), y=self._mb.mul(x=crossed, y=sine))

    def _norm(self, x: Any, name: str, axis: int) -> Any:
        """RMS norm. A square can overflow fp16. [x, -x] has mean 0, so layer_norm divides by the RMS of x."""
        mirrored = self._mb.concat(values=[x, self._mb.mul(x=x, y=np.float16(-1))], axis=axis)
        scaled = self._mb.layer_norm(x=mirrored, axes=[axis], epsilon=np.float16(self._shape.epsilon))
        half, _ = self._mb.split(x=scaled, num_splits=2, axis=axis)
        return self._mb.mul(x=half, y=self._constants.vector(name, axis))

    def _project(self, x: Any, name: str) -> Any:
        return self._convolve(x, self._constants.kernel(f"{name}.weight"), self._constants.bias(f"{name}.bias"))

    def _convolve(self, x: Any, kernel: Any, bias: Any | None = None) -> Any:
        optional = {} if bias is None else {"bias": bias}
        return self._mb.conv(x=x, weight=kernel, pad_type="valid", **optional)
