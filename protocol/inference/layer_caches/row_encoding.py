"""How keys, or values, of tokens are stored: as they are, or in fewer bits. Knows no slots."""

from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx

Stored: TypeAlias = tuple[mx.array, ...]
"""Arrays (1, heads, rows, any size)."""
_GROUP_SIZES = (64, 32)
"""Of MLX's quantization, the best first: a group has a scale and a bias."""


class RowEncoding(Protocol):
    """A row's bytes depend on nothing but that row, so it is stored alike in a forward of any width."""

    def encoded(self, rows: mx.array) -> Stored:
        """Store (1, heads, rows, size)."""
        ...

    def fetched(self, stored: Stored) -> Any:
        """What mlx-lm's attention takes."""
        ...

    def packed(self, stored: Stored) -> mx.array:
        """All bytes of a row in one, (1, heads, rows, elements) of the model's own element type."""
        ...

    def unpacked(self, packed: mx.array) -> Stored:
        """The inverse of `packed`."""
        ...


class PlainRows:
    """Rows as the model computes them."""

    def encoded(self, rows: mx.array) -> Stored:
        return (rows,)

    def fetched(self, stored: Stored) -> mx.array:
        return stored[0]

    def packed(self, stored: Stored) -> mx.array:
        return stored[0]

    def unpacked(self, packed: mx.array) -> Stored:
        return (packed,)


class QuantizedRows(NamedTuple):
    """MLX's affine quantization: packed uint32, and a scale and a bias for each group of elements."""

    bits: int
    group_size: int
    fused: bool
    """Attention reads the quantized rows, by mlx-lm's quantized attention. Otherwise it gets rows of the model's own
    element type, made for each forward."""

    def encoded(self, rows: mx.array) -> Stored:
        return mx.quantize(rows, group_size=self.group_size, bits=self.bits)

    def fetched(self, stored: Stored) -> Any:
        if self.fused:
            return stored
        packed, scales, biases = stored
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)

    def packed(self, stored: Stored) -> mx.array:
        element = stored[1].dtype
        bits = _bits_type(element)
        return mx.concatenate([mx.contiguous(part).view(bits) for part in stored], axis=-1).view(element)

    def unpacked(self, packed: mx.array) -> Stored:
        element = packed.dtype
        bits = _bits_type(element)
        elements = self.bits * self.group_size // (8 * element.size)
        groups = packed.shape[-1] // (elements + 2)
        parts = mx.split(packed.view(bits), [groups * elements, groups * (elements + 1)], axis=-1)
        rows, scales, biases = map(mx.contiguous, parts)
        return rows.view(mx.uint32), scales.view(element), biases.view(element)


def quantized_rows(bits: int, sizes: tuple[int, ...], fused: bool) -> QuantizedRows | None:
    """The encoding of keys and values with heads of these sizes; None if no group size divides them."""
    group = next((each for each in _GROUP_SIZES if not any(size % each for size in sizes)), None)
    return None if group is None else QuantizedRows(bits, group, fused)


def _bits_type(element: mx.Dtype) -> mx.Dtype:
    return mx.uint16 if element.size == 2 else mx.uint32
