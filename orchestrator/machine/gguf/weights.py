"""A GGUF tensor's bytes as MLX stores weights, and the file that holds them. Knows no names and no architecture.

A type whose blocks of 32 are a regular grid, w = scale * q + bias, keeps its integers: only the products of a K-quant's
scales are rounded, once, to 16 bits. MXFP4 and NVFP4 stay as they are. A type without such a form is quantised again,
in the smallest affine form whose error is below the type's own, Q6_K in a better one
(docs/log/2026-11-29-gguf-at-its-own-size.md).
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import Q4_K, dequantize

from orchestrator.machine.gguf.container import GgufTensor, Laid
from protocol.errors import InputError

Format: TypeAlias = Literal["F16", "BF16", "F32"]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
_CHUNK = 1 << 20
"""Elements that are unpacked at once."""
_PLAIN: dict[Kind, Format] = {Kind.F16: "F16", Kind.BF16: "BF16", Kind.F32: "F32"}
_FITS = 2
_SIZES = {"U8": 1, "U32": 4, "F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 8


class Part(NamedTuple):
    """One array of a safetensors file."""

    name: str
    format: str
    """As safetensors names it."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * _SIZES[self.format]


class Packed(NamedTuple):
    """How MLX reads a packed matrix."""

    bits: int
    group: int = 32
    """Weights that share a scale."""
    mode: Literal["affine", "mxfp4", "nvfp4"] = "affine"


class Deviation:
    """Of what was quantised again from the file's own weights."""

    def __init__(self) -> None:
        self._off = self._total = 0.0

    def add(self, weights: Floats, stored: Floats) -> None:
        self._off += float(np.square(stored - weights, dtype=np.float64).sum())
        self._total += float(np.square(weights, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        """Root mean square, of that of the weights."""
        return math.sqrt(self._off / self._total) if self._total else 0.0


Convert: TypeAlias = Callable[[Any, Deviation], tuple[Bytes, ...]]
"""Places of rows in the file to the bytes of each part."""


class Stored(NamedTuple):
    """What is stored of one matrix or vector."""

    parts: tuple[Part, ...]
    """The weights first; of packed ones then scales and biases."""
    chunks: Callable[[Deviation], Iterator[tuple[Bytes, ...]]]
    """The bytes of each part, in order."""
    kind: Kind
    packed: Packed | None
    again: bool
    """It is quantised again."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.size for part in self.parts)


def common_format(tensors: list[GgufTensor]) -> Format:
    """The format of all that is not packed, since MLX would compute in float32 beside a single float32 vector."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    return _PLAIN[kinds.pop()] if len(kinds) == 1 and kinds <= _PLAIN.keys() else "F16"


def stored(tensor: GgufTensor, name: str, format: Format, laid: Laid) -> Stored:
    """The tensor as `name`. Raises InputError for a quantisation that can't be read."""
    columns = math.prod(tensor.shape) // len(tensor.rows)
    rows = len(tensor.rows) if laid.rows is None else len(laid.rows)
    step = rows if laid.whole else max(1, _CHUNK // columns)
    packed, read = None, None
    if len(laid.shape) > 1 and laid.value is None:
        packed, read = _FORMS.get(tensor.kind, (None, None)) if tensor.factors is None else (_SCALED, None)
    if packed is None:
        format = "F32" if laid.exact else format
        parts = (Part(name, format, laid.shape),)
        convert = _plain(tensor, format, laid)
    else:
        stem, leading = name.removesuffix(".weight"), laid.shape[:-1]
        groups, scale = (*leading, columns // packed.group), "F16" if packed.mode == "affine" else "U8"
        kinds = ("scales", "biases") if packed.mode == "affine" else ("scales",)
        weight = Part(name, "U32", (*leading, columns * packed.bits // 32))
        parts = (weight, *(Part(f"{stem}.{kind}", scale, groups) for kind in kinds))
        convert = _again(tensor, packed, laid) if read is None else _kept(tensor, packed, read, laid)

    def chunks(deviation: Deviation) -> Iterator[tuple[Bytes, ...]]:
        for first in range(0, rows, step):
            yield convert(
                slice(first, first + step) if laid.rows is None else laid.rows[first : first + step], deviation
            )

    return Stored(parts, chunks, tensor.kind, packed, packed is not None and read is None)


def _plain(tensor: GgufTensor, format: Format, laid: Laid) -> Convert:
    if _PLAIN.get(tensor.kind) == format and laid.value is None and laid.columns is None:
        return lambda chosen, _: (_bytes(tensor.rows[chosen]),)
    _require_readable(tensor)

    def convert(chosen: Any, _: Deviation) -> tuple[Bytes, ...]:
        numbers = _numbers(tensor, laid, chosen)
        return (_written(numbers if laid.value is None else laid.value(numbers), format),)

    return convert


def _again(tensor: GgufTensor, packed: Packed, laid: Laid) -> Convert:
    most = (1 << packed.bits) - 1

    def convert(chosen: Any, deviation: Deviation) -> tuple[Bytes, ...]:
        weights = _numbers(tensor, laid, chosen).reshape(-1, packed.group)
        bias = weights.min(axis=1, keepdims=True)
        scale = (weights.max(axis=1, keepdims=True) - bias) / np.float32(most)
        mean = weights.mean(axis=1, keepdims=True)
        for _ in range(_FITS):
            # The line of least squares through the weights over their codes.
            codes = _codes(weights, scale, bias, most).astype(np.float32)
            middle = codes.mean(axis=1, keepdims=True)
            spread = np.square(codes - middle).sum(axis=1, keepdims=True)
            slope = ((codes - middle) * (weights - mean)).sum(axis=1, keepdims=True)
            scale = np.divide(slope, spread, out=scale, where=spread > 0)
            bias = mean - scale * middle
        scale, bias = (each.astype("<f2").astype(np.float32) for each in (scale, bias))
        codes = _codes(weights, scale, bias, most)
        deviation.add(weights, scale * codes + bias)
        return _fields(codes, packed.bits), _written(scale, "F16"), _written(bias, "F16")

    return convert


def _kept(tensor: GgufTensor, packed: Packed, read: "_Read", laid: Laid) -> Convert:
    order = slice(None) if laid.columns is None else _order_of_groups(tensor, laid.columns, packed.group)
    size = GGML_QUANT_SIZES[tensor.kind][1]

    def convert(chosen: Any, _: Deviation) -> tuple[Bytes, ...]:
        rows = np.ascontiguousarray(tensor.rows[chosen])
        first, second = (each.reshape(len(rows), -1) for each in read(rows.reshape(-1, size)))
        if packed.mode != "affine":
            codes = first.reshape(len(rows), -1, packed.group)[:, order]
            return _fields(codes, packed.bits), _bytes(second[:, order])
        weights = floats(rows, tensor.kind).reshape(len(rows), -1, packed.group)[:, order]
        # A block may have one scale for several groups.
        repeats = weights.shape[1] // first.shape[1]
        scale, bias = (np.repeat(each, repeats, axis=1)[:, order] for each in (first, second))
        codes = _codes(weights, scale[..., None], bias[..., None], (1 << packed.bits) - 1)
        return _fields(codes, packed.bits), _written(scale, "F16"), _written(bias, "F16")

    return convert


def _numbers(tensor: GgufTensor, laid: Laid, chosen: Any) -> Floats:
    numbers = floats(np.ascontiguousarray(tensor.rows[chosen]), tensor.kind)
    if tensor.factors is not None:
        numbers *= tensor.factors[chosen][:, None]
    return numbers if laid.columns is None else numbers[:, laid.columns]


def _codes(weights: Floats, scale: Floats, bias: Floats, most: int) -> Bytes:
    """The integers q of scale * q + bias that are nearest."""
    with np.errstate(all="ignore"):
        numbers = (weights - bias) * np.where(scale == 0, np.float32(0), 1 / scale)
        return np.clip(np.rint(np.nan_to_num(numbers)), 0, most).astype(np.uint8)


def _fields(codes: Bytes, bits: int) -> Bytes:
    """Fields of so many bits, the first one lowest (MLX's `quantize`)."""
    eights = codes.reshape(-1, 8)
    words = np.zeros(len(eights), "<u8")
    for place in range(8):
        words |= eights[:, place].astype("<u8") << np.uint64(place * bits)
    return _bytes(words.view(np.uint8).reshape(-1, 8)[:, :bits])


def _order_of_groups(tensor: GgufTensor, columns: Any, group: int) -> Any:
    """The order of columns as that of groups. Raises InputError if groups don't stay together."""
    runs = np.asarray(columns).reshape(-1, group) if len(columns) % group == 0 else np.zeros((1, group))
    if (runs != runs[:, :1] + np.arange(group)).any() or (runs[:, 0] % group).any():
        raise InputError(
            f"The tensor {tensor.name} has heads that are no multiple of {group}, which can't be put in order as they "
            "are packed: choose a file in F16 or Q6_K."
        )
    return runs[:, 0] // group


def floats(rows: Bytes, kind: Kind) -> Floats:
    """(R, columns) float32 of rows as they are in the file."""
    return np.asarray(dequantize(rows, kind), np.float32)


def _require_readable(tensor: GgufTensor) -> None:
    try:
        floats(np.zeros_like(tensor.rows[:1]), tensor.kind)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise InputError(
            f"The tensor {tensor.name} is quantised in {tensor.kind.name}, which can't be read: choose a file in Q4_0, "
            "Q8_0, MXFP4, a K-quant or F16."
        ) from error


def _written(numbers: Floats, format: Format) -> Bytes:
    # Numbers beyond float16 become infinite, as in llama.cpp.
    with np.errstate(over="ignore", invalid="ignore"):
        if format == "BF16":
            return _bfloat16(numbers)
        return _bytes(numbers.astype("<f2" if format == "F16" else "<f4"))


def _bytes(numbers: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def _bfloat16(numbers: Floats) -> Bytes:
    """The upper half of each float32, rounded to even."""
    words = np.ascontiguousarray(numbers, "<f4").view("<u4")
    return _bytes(((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype("<u2"))


# The types, by blocks (N, block bytes) ------------------------------------------------------------

_Read: TypeAlias = Callable[[Bytes], tuple[Any, Any]]
"""Of an affine form scales and biases, (N,) or (N, groups of a block) float32; of others the codes (N, weights of a
block) and the scales (N, groups of a block)."""


def _half(blocks: Bytes, first: int) -> Floats:
    """(N,) of two bytes each."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2")[:, 0].astype(np.float32)


def _symmetric(zero: int, place: int = 0) -> _Read:
    """w = scale * (q - zero)."""
    return lambda blocks: (_half(blocks, place), _half(blocks, place) * np.float32(-zero))


def _with_minimum(blocks: Bytes) -> tuple[Any, Any]:
    """w = scale * q + minimum."""
    return _half(blocks, 0), _half(blocks, 2)


def _super_block(blocks: Bytes) -> tuple[Any, Any]:
    """w = (scale * s) * q - minimum * m, with a scale and a minimum for 8 groups and s and m of 6 bits for each."""
    factors, offsets = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scale, minimum = _half(blocks, 0)[:, None], _half(blocks, 2)[:, None]
    return scale * factors.astype(np.float32), -minimum * offsets.astype(np.float32)


def _nibbles(blocks: Bytes) -> Bytes:
    """(N, 2 n) of the last axis: first the low four bits of all n bytes, then the high ones."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1, dtype=np.uint8)


_FORMS: dict[Kind, tuple[Packed, _Read | None]] = {
    Kind.Q4_0: (Packed(4), _symmetric(8)),
    Kind.Q4_1: (Packed(4), _with_minimum),
    Kind.Q5_0: (Packed(5), _symmetric(16)),
    Kind.Q5_1: (Packed(5), _with_minimum),
    Kind.Q8_0: (Packed(8), _symmetric(128)),
    Kind.Q4_K: (Packed(4), _super_block),
    Kind.Q5_K: (Packed(5), _super_block),
    # Three values, and a scale behind those of 256 weights.
    Kind.TQ1_0: (Packed(2, 128), _symmetric(1, place=52)),
    Kind.TQ2_0: (Packed(2, 128), _symmetric(1, place=64)),
    # An exponent and 16 bytes (OCP Microscaling Formats).
    Kind.MXFP4: (Packed(4, 32, "mxfp4"), lambda blocks: (_nibbles(blocks[:, 1:]), blocks[:, :1])),
    # Four scales in E4M3, and 8 bytes for each.
    Kind.NVFP4: (
        Packed(4, 16, "nvfp4"),
        lambda blocks: (_nibbles(blocks[:, 4:].reshape(-1, 4, 8)), blocks[:, :4]),
    ),
    # Quantised again.
    Kind.Q6_K: (Packed(8, 128), None),
    Kind.Q3_K: (Packed(3), None),
    Kind.Q2_K: (Packed(2), None),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS), (Packed(4), None)),
    Kind.IQ3_S: (Packed(4, 128), None),
    Kind.IQ3_XXS: (Packed(3, 64), None),
    **dict.fromkeys((Kind.IQ2_S, Kind.IQ2_XS), (Packed(3, 128), None)),
    **dict.fromkeys((Kind.IQ2_XXS, Kind.IQ1_M, Kind.IQ1_S), (Packed(2, 128), None)),
}
_SCALED = Packed(4, 64)
"""Of NVFP4 with a scale of the whole matrix, which MLX's layers don't have."""


# The file -----------------------------------------------------------------------------------------


def write_safetensors(file: Path, content: Sequence[Stored], on_bytes: Callable[[int, int], None]) -> dict[str, float]:
    """`on_bytes` gets how many bytes of how many are written. Returns how far the weights of each kind that is
    quantised again are off, as of `Deviation.relative`. Raises OSError if they can't be written."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    total = 0
    for part in (part for each in content for part in each.parts):
        entries[part.name] = {
            "dtype": part.format,
            "shape": part.shape,
            "data_offsets": (total, total + part.size),
        }
        total += part.size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    written, begin = 0, 8 + len(header)
    deviations: dict[Kind, Deviation] = {}
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for each in content:
            deviation = deviations.setdefault(each.kind, Deviation()) if each.again else Deviation()
            ends = np.cumsum([begin, *(part.size for part in each.parts)]).tolist()
            places = ends[:-1]
            for chunk in each.chunks(deviation):
                # Scales come with their weights, and stand behind all of them.
                for number, data in enumerate(chunk):
                    out.seek(places[number])
                    out.write(data.data)
                    places[number] += data.nbytes
                    written += data.nbytes
                on_bytes(written, total)
            if places != ends[1:]:
                raise ValueError(f"{each.parts[0].name} does not have the bytes of its shape")
            begin = ends[-1]
    return {kind.name: deviation.relative for kind, deviation in deviations.items()}
