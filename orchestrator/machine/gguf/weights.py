"""A GGUF tensor's bytes as MLX stores weights: 4 and 8 bits in groups of 32 as they are, all others in float16.

Knows no names and no architecture.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from orchestrator.machine.gguf.container import GgufTensor, Laid
from protocol.errors import InputError

GROUP = 32
"""Weights that share a scale and a bias, in GGUF's formats and so in ours."""
Format: TypeAlias = Literal["F16", "BF16", "F32"]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_CHUNK = 1 << 22
"""Elements that are unpacked at once."""
_PLAIN: dict[GGMLQuantizationType, Format] = {
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
    GGMLQuantizationType.F32: "F32",
}


class Part(NamedTuple):
    """One array of a safetensors file."""

    name: str
    format: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Bytes]]
    """Its bytes, in order."""


class _Packing(NamedTuple):
    """What MLX stores of blocks (N, block bytes): w = scale * q + bias, q unsigned, the first one lowest (MLX's
    `quantize`)."""

    bits: int
    weight: Callable[[Bytes], Bytes]
    scales: Callable[[Bytes], Bytes]
    biases: Callable[[Bytes], Bytes] | None
    """None for MXFP4, whose scales are exponents of a byte (OCP Microscaling Formats)."""


class Packed(NamedTuple):
    """How MLX reads a packed matrix."""

    bits: int
    mode: str


def packed(tensor: GgufTensor, laid: Laid) -> Packed | None:
    """The packing of a matrix that MLX can have as it is, else None."""
    plain = len(laid.shape) < 2 or laid.value is not None
    packing = None if plain else _PACKINGS.get(tensor.kind)
    return packing and Packed(packing.bits, "affine" if packing.biases else "mxfp4")


def common_format(tensors: list[GgufTensor]) -> Format:
    """The format of all that is not packed, since MLX would compute in float32 beside a single float32 vector."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    return _PLAIN[kinds.pop()] if len(kinds) == 1 and kinds <= _PLAIN.keys() else "F16"


def parts(tensor: GgufTensor, name: str, format: Format, laid: Laid) -> list[Part]:
    """What is stored of the tensor: `name`, and beside packed weights their scales and biases.

    Raises InputError for a quantisation that can't be read.
    """
    columns = int(np.prod(tensor.shape)) // len(tensor.rows)
    format = "F32" if laid.exact else format
    rows = len(tensor.rows) if laid.rows is None else len(laid.rows)
    step = rows if laid.whole else max(1, _CHUNK // columns)

    def chunks(convert: Callable[[Bytes], Bytes]) -> Callable[[], Iterator[Bytes]]:
        def made() -> Iterator[Bytes]:
            for first in range(0, rows, step):
                chosen = slice(first, first + step) if laid.rows is None else laid.rows[first : first + step]
                yield convert(np.ascontiguousarray(tensor.rows[chosen]))

        return made

    packing = _PACKINGS.get(tensor.kind)
    if packing is not None and packed(tensor, laid):
        block = tensor.rows.shape[1] * GROUP // columns
        groups = (*laid.shape[:-1], columns // GROUP)
        stem = name.removesuffix(".weight")
        order = None if laid.columns is None else _order_of_groups(tensor, laid.columns)

        def by_block(convert: Callable[[Bytes], Bytes]) -> Callable[[], Iterator[Bytes]]:
            def ordered(taken: Bytes) -> Bytes:
                blocks = taken.reshape(len(taken), -1, block)
                return convert((blocks if order is None else blocks[:, order]).reshape(-1, block))

            return chunks(ordered)

        weight = Part(name, "U32", (*laid.shape[:-1], columns * packing.bits // 32), by_block(packing.weight))
        if packing.biases is None:
            return [weight, Part(f"{stem}.scales", "U8", groups, by_block(packing.scales))]
        return [
            weight,
            Part(f"{stem}.scales", "F16", groups, by_block(packing.scales)),
            Part(f"{stem}.biases", "F16", groups, by_block(packing.biases)),
        ]
    if _PLAIN.get(tensor.kind) == format and laid.value is None and laid.columns is None:
        return [Part(name, format, laid.shape, chunks(lambda taken: taken.reshape(-1)))]
    _require_readable(tensor)

    def plain(taken: Bytes) -> Bytes:
        numbers = floats(taken, tensor.kind)
        if laid.columns is not None:
            numbers = numbers[:, laid.columns]
        return _written(numbers if laid.value is None else laid.value(numbers), format)

    return [Part(name, format, laid.shape, chunks(plain))]


def _order_of_groups(tensor: GgufTensor, columns: Any) -> Any:
    """The order of columns as that of groups. Raises InputError if groups don't stay together."""
    runs = np.asarray(columns).reshape(-1, GROUP) if len(columns) % GROUP == 0 else np.zeros((1, GROUP))
    if (runs != runs[:, :1] + np.arange(GROUP)).any() or (runs[:, 0] % GROUP).any():
        raise InputError(
            f"The tensor {tensor.name} has heads that are no multiple of {GROUP}, which can't be put in order as they "
            "are packed: choose a file in F16 or a K-quant."
        )
    return runs[:, 0] // GROUP


def floats(rows: Bytes, kind: GGMLQuantizationType) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(R, columns) float32 of rows as they are in the file."""
    return np.asarray(dequantize(rows, kind), np.float32)


def _require_readable(tensor: GgufTensor) -> None:
    try:
        floats(np.zeros_like(tensor.rows[:1]), tensor.kind)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise InputError(
            f"The tensor {tensor.name} is quantised in {tensor.kind.name}, which can't be read: choose a file in Q4_0, "
            "Q4_1, Q8_0, MXFP4, a K-quant or F16."
        ) from error


def _nibbles(blocks: Bytes) -> Bytes:
    """(N, 16) bytes of a block's 32 numbers in order; GGUF has the first half in the low four bits."""
    numbers = np.concatenate([blocks & 15, blocks >> 4], axis=1)
    return (numbers[:, 0::2] | numbers[:, 1::2] << 4).astype(np.uint8)


def _times(halves: Bytes, factor: float) -> Bytes:
    """Float16 numbers times a power of two or its negative, which is exact."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _bytes(np.ascontiguousarray(halves).view("<f2") * np.float16(factor))


def _written(numbers: np.ndarray[Any, np.dtype[np.float32]], format: Format) -> Bytes:
    # Numbers beyond float16 become infinite, as in llama.cpp.
    with np.errstate(over="ignore", invalid="ignore"):
        if format == "BF16":
            return _bfloat16(numbers)
        return _bytes(numbers.astype("<f2" if format == "F16" else "<f4"))


def _bytes(numbers: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def _bfloat16(numbers: np.ndarray[Any, np.dtype[np.float32]]) -> Bytes:
    """The upper half of each float32, rounded to even."""
    words = np.ascontiguousarray(numbers, "<f4").view("<u4")
    return _bytes(((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype("<u2"))


_PACKINGS: dict[GGMLQuantizationType, _Packing] = {
    # float16 scale, 16 bytes: w = scale * (q - 8)
    GGMLQuantizationType.Q4_0: _Packing(
        4, lambda b: _nibbles(b[:, 2:]), lambda b: _bytes(b[:, :2]), lambda b: _times(b[:, :2], -8.0)
    ),
    # float16 scale and minimum, 16 bytes: w = scale * q + minimum
    GGMLQuantizationType.Q4_1: _Packing(
        4, lambda b: _nibbles(b[:, 4:]), lambda b: _bytes(b[:, :2]), lambda b: _bytes(b[:, 2:4])
    ),
    # float16 scale, 32 signed bytes: w = scale * q
    GGMLQuantizationType.Q8_0: _Packing(
        8, lambda b: b[:, 2:] ^ np.uint8(0x80), lambda b: _bytes(b[:, :2]), lambda b: _times(b[:, :2], -128.0)
    ),
    # exponent, 16 bytes: w = 2^(exponent - 127) * E2M1(q)
    GGMLQuantizationType.MXFP4: _Packing(4, lambda b: _nibbles(b[:, 1:]), lambda b: _bytes(b[:, :1]), None),
}
