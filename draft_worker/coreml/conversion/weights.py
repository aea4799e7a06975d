"""A checkpoint's parameters as constants that the functions of a package share."""

from typing import Any, TypeVar

import numpy as np

from draft_worker.coreml.arrays import Array, Half
from draft_worker.coreml.conversion.compression import Palettes, Scaled, StoredWeight, compress
from draft_worker.coreml.conversion.convertible import Convertible
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.coreml.conversion import WeightKind

_CHANNELS = 16_384
"""Most output channels of a convolution on the Neural Engine."""
_ALIGNED = 32
"""fp16 numbers in 64 bytes, the Neural Engine's alignment of an axis."""
Rows = TypeVar("Rows", Half, range)


class Constants:
    """Makes MIL constants. Reads and compresses each parameter once, for all functions."""

    def __init__(self, model: Convertible, kind: WeightKind) -> None:
        self._model = model
        self._kind: WeightKind = kind
        self._stored: dict[str, StoredWeight] = {}
        self._head: dict[str, StoredWeight] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._model

    def vector(self, name: str, axis: int, rank: int = 4) -> Any:
        """A norm's weight along `axis`."""
        shape = [1] * rank
        shape[axis] = -1
        return _constant(self._half(name).reshape(shape), name)

    def bias(self, name: str) -> Any | None:
        return _constant(self._half(name), name) if name in self._model else None

    def taps(self, name: str) -> tuple[Any, Any]:
        """A depthwise kernel (channels, taps, 1): weights of a token's ancestors, nearest first, and its own weights.

        Their shapes are (1, taps - 1, channels, 1) and (1, channels, 1, 1).
        """
        kernel = self._half(name)
        ancestors = kernel[:, -2::-1, 0].T[None, :, :, None]
        return _constant(ancestors, f"{name}.ancestors"), _constant(kernel[None, :, -1:], f"{name}.own")

    def kernel(self, name: str) -> Any:
        """A matrix (outputs, inputs) as the kernel (outputs, inputs, 1, 1) of a convolution."""
        if name not in self._stored:
            self._stored[name] = compress(self._model.half(name), self._kind)
        return _kernel(self._stored[name], name)

    def head_kernels(self) -> list[Any]:
        """The output head in chunks of rows that fit the Neural Engine, as even as alignment allows."""
        if not self._head:
            name, head = self._model.head()
            # A head in 4 bits costs more accuracy than all layers together and is read only once for each token.
            kind: WeightKind = "int8" if self._kind == "4bit" else self._kind
            self._head = {f"{name}.{index}": compress(rows, kind) for index, rows in enumerate(head_chunks(head))}
        return [_kernel(stored, name) for name, stored in self._head.items()]

    def _half(self, name: str) -> Half:
        if name not in self._stored:
            self._stored[name] = self._model.half(name)
        held = self._stored[name]
        assert isinstance(held, np.ndarray)
        return held


def head_chunks(rows: Rows) -> list[Rows]:
    """Contiguous runs of rows within the Neural Engine's channel limit."""
    count = -(-len(rows) // _CHANNELS)
    size = -(-len(rows) // (count * _ALIGNED)) * _ALIGNED
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _kernel(stored: StoredWeight, name: str) -> Any:
    operations, uint4 = toolchain().operations, toolchain().uint4
    match stored:
        case Scaled(values, scale):
            return operations.constexpr_blockwise_shift_scale(
                data=_constant(values[:, :, None, None], f"{name}.values"),
                scale=_constant(scale[:, :, None, None], f"{name}.scale"),
                name=_identifier(name),
            )
        case Palettes(indices, tables):
            return operations.constexpr_lut_to_dense(
                indices=_constant(indices.astype(uint4)[:, :, None, None], f"{name}.indices"),
                lut=_constant(tables[:, None, None, None, :, None], f"{name}.palettes"),
                name=_identifier(name),
            )
        case _:
            return _constant(stored[:, :, None, None], name)


def _constant(array: Array, name: str) -> Any:
    """A constant that the weight file holds once, for all functions that use the same name."""
    constant = toolchain().operations.const(val=np.ascontiguousarray(array), name=_identifier(name))
    constant.op.weight_id = name
    return constant


def _identifier(name: str) -> str:
    return name.replace(".", "_")
