"""A checkpoint's parameters as constants that the functions of a package share.

The stored forms of a matrix are fp16, int8 per channel, and 4-bit palettes.
"""

from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from draft_worker.coreml.conversion.checkpoint import Checkpoint
from draft_worker.coreml.package import Array, Half, Single
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.coreml import WeightKind

_PALETTE = 16
_ITERATIONS = 20
"""Of Lloyd's algorithm; the error of Gaussian values is then within 1% of the least possible."""
_LEVELS = 1024
"""Bins of the histograms to which palettes are fitted."""
_ROWS = 256
"""Channels fitted together. Their histograms fit the CPU's cache."""


class Scaled(NamedTuple):
    """weight[o, i] is values[o, i] * scale[o, 0]."""

    values: npt.NDArray[np.int8]
    scale: Half


class Palettes(NamedTuple):
    """weight[o, i] is tables[o, indices[o, i]]: one palette for each output channel."""

    indices: npt.NDArray[np.uint8]
    tables: Half
    """(outputs, 16), each row ascending."""


StoredWeight: TypeAlias = Half | Scaled | Palettes


def compress(weight: Half, kind: WeightKind) -> StoredWeight:
    """`weight`: (outputs, inputs)."""
    match kind:
        case "fp16":
            return weight
        case "int8":
            return _scaled(weight)
        case "4bit":
            return _palettes(weight)


def restore(stored: StoredWeight) -> Half:
    """The weight on the device; every product is rounded to fp16, as Core ML defines it."""
    match stored:
        case Scaled(values, scale):
            return values.astype(np.float16) * scale
        case Palettes(indices, tables):
            return np.take_along_axis(tables, indices, axis=1)
        case _:
            return stored


def _scaled(weight: Half) -> Scaled:
    largest = np.abs(weight.astype(np.float32)).max(axis=1, keepdims=True)
    # The scale is rounded to fp16 first: then the values are the best ones for the stored scale.
    scale = np.maximum(largest / 127, np.finfo(np.float16).tiny).astype(np.float16)
    return Scaled(np.clip(np.rint(weight / scale.astype(np.float32)), -127, 127).astype(np.int8), scale)


def _palettes(weight: Half) -> Palettes:
    blocks = [_fit(weight[begin : begin + _ROWS].astype(np.float32)) for begin in range(0, len(weight), _ROWS)]
    return Palettes(np.concatenate([block.indices for block in blocks]), np.concatenate([b.tables for b in blocks]))


def _fit(rows: Single) -> Palettes:
    """A palette of sixteen numbers for each row: k-means in one dimension (Lloyd 1982).

    The cumulative sums of a row's histogram give the means of all clusters at once.
    """
    low = rows.min(axis=1, keepdims=True)
    step = np.maximum(rows.max(axis=1, keepdims=True) - low, np.finfo(np.float16).tiny) / (_LEVELS - 1)
    bins = np.rint((rows - low) / step).astype(np.int64)
    flat = (bins + np.arange(len(rows))[:, None] * _LEVELS).reshape(-1)
    counts = _cumulative(np.bincount(flat, minlength=len(rows) * _LEVELS), len(rows))
    sums = _cumulative(np.bincount(flat, weights=bins.reshape(-1), minlength=len(rows) * _LEVELS), len(rows))
    # Initial centres: equal shares of the cube root of the density, the best for many levels (Panter and Dite 1951).
    roots = _cumulative(np.cbrt(np.diff(counts, axis=1)), len(rows))
    shares = (np.arange(_PALETTE) + 0.5) / _PALETTE * roots[:, -1:]
    centres = (roots[:, None, 1:] < shares[:, :, None]).sum(axis=2).astype(np.float64)
    for _ in range(_ITERATIONS):
        edges = _edges(centres)
        members = np.diff(np.take_along_axis(counts, edges, axis=1))
        means = np.diff(np.take_along_axis(sums, edges, axis=1)) / np.maximum(members, 1)
        centres = np.sort(np.where(members > 0, means, centres), axis=1)
    # The palette entry of a bin is the number of inner edges at or below it.
    nearest = (np.arange(_LEVELS)[None, :, None] >= _edges(centres)[:, None, 1:-1]).sum(axis=2, dtype=np.uint8)
    return Palettes(np.take_along_axis(nearest, bins, axis=1), (low + centres * step).astype(np.float16))


def _cumulative(flat: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """(rows, bins + 1): the sum below each bin."""
    return np.pad(np.cumsum(flat.reshape(rows, _LEVELS), axis=1), ((0, 0), (1, 0)))


def _edges(centres: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """(rows, 17): the first bin of each cluster, then the number of bins."""
    between = np.floor((centres[:, 1:] + centres[:, :-1]) / 2).astype(np.int64) + 1
    return np.pad(between, ((0, 0), (1, 1)), constant_values=((0, 0), (0, _LEVELS)))


_CHANNELS = 16_384
"""Most output channels of a convolution on the Neural Engine."""
_ALIGNED = 32
"""fp16 numbers in 64 bytes, the Neural Engine's alignment of an axis."""
Rows = TypeVar("Rows", Half, range)


class Constants:
    """Makes MIL constants. Reads and compresses each parameter once, for all functions."""

    def __init__(self, model: Checkpoint, kind: WeightKind) -> None:
        self._model = model
        self._kind: WeightKind = kind
        self._stored: dict[str, StoredWeight] = {}
        self._head: dict[str, StoredWeight] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._model

    def vector(self, name: str, axis: int) -> Any:
        """A norm's weight along `axis`."""
        shape = [1] * 4
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
