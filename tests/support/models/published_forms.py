"""Packed weights as their publishers lay them out, with random codes, and what the codes mean; independent of MLX."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Stored = dict[str, tuple[str, np.ndarray]]
"""Tensors by name, each with its type in the file."""
Form = Callable[[np.random.Generator, tuple[int, ...]], tuple[Stored, np.ndarray]]
"""A weight's tensors by what stands behind its module's name, and the weight."""

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BYTES = np.arange(256)
_EXPONENT, _MANTISSA = (_BYTES >> 3) & 15, _BYTES & 7
_FP8 = np.where(_EXPONENT > 0, (8 + _MANTISSA) * 2.0**_EXPONENT, 2 * _MANTISSA) / 2.0**10 * (1 - 2 * (_BYTES >> 7))


def whole(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
    values = (random.normal(size=shape) / 8).astype(np.float16)
    return {"weight": ("F16", values)}, values.astype(np.float32)


def integers(bits: int, group: int = 0, *, vllm: bool = False, zeros: bool = False) -> Form:
    """MLX's affine form, or compressed-tensors' `pack-quantized`. Scales have few digits, so that a scale times a code
    is a number of 16 bits. `group` 0: whole rows."""

    def form(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        codes, groups = random.integers(0, 2**bits, shape), (*shape[:-1], shape[-1] // (group or shape[-1]))
        scales = (random.choice([1, 1.5], groups) * 2.0 ** (random.integers(-2, 1, groups) - bits)).astype(np.float16)
        zero = random.integers(4, 12, groups) if zeros else np.full(groups, 2 ** (bits - 1))
        words, values = _words(codes, bits), _scaled(codes - _scaled(np.ones(shape), zero), scales)
        if not vllm:
            biases = -zero.astype(np.float16) * scales
            return {"weight": ("U32", words), "scales": ("F16", scales), "biases": ("F16", biases)}, values
        further = {"weight_zero_point": ("I32", _words(zero.T, bits).T)} if zeros else {}
        stored = {"weight_packed": ("I32", words), "weight_shape": ("I64", np.array(shape)), **further}
        return stored | {"weight_scale": ("F16", scales)}, values

    return form


def floats(
    bits: int,
    group: int,
    overall: str = "",
    names: tuple[str, str] = ("weight", "scales"),
    types: tuple[str, str] = ("U32", "U8"),
) -> Form:
    """MXFP4, MXFP8 and NVFP4 (groups of 16). `overall`: the name of a scale of the whole tensor."""

    def form(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        codes = random.integers(0, 2**bits, shape) & (~64 if bits == 8 else 15)
        low, high, numbers = (32, 56, _FP8) if group == 16 else (118, 122, 2.0 ** (_BYTES - 127))
        scales = random.integers(low, high, (*shape[:-1], shape[-1] // group)).astype(np.uint8)
        stored = {names[0]: (types[0], _words(codes, bits)), names[1]: (types[1], scales)}
        values = _scaled((_FP8 if bits == 8 else _FP4)[codes], numbers[scales])
        if overall:
            factor = random.uniform(0.3, 0.9, shape[:-2]).astype(np.float32)
            kinds = {"weight_scale_2": factor, "weight_global_scale": 1 / factor[None], "global_scale": 2688 * factor}
            stored[overall] = ("F32", kinds[overall])
            if types[0] == "U8":
                stored["input_scale"] = ("F32", factor)
            values *= factor[..., None, None]
        return stored, values

    return form


def modelopt(bits: int, group: int) -> Form:
    overall, types = ("weight_scale_2", ("U8", "F8_E4M3")) if group == 16 else ("", ("F8_E4M3", "U8"))
    return floats(bits, group, overall, ("weight", "weight_scale"), types)


def vllm_floats(group: int) -> Form:
    overall, scales = ("weight_global_scale", "F8_E4M3") if group == 16 else ("", "U8")
    return floats(4, group, overall, ("weight_packed", "weight_scale"), ("U8", scales))


def without_groups(kind: str, scale: str) -> Form:
    """Forms that nobody reads, of codes or numbers with a scale for each row."""

    def form(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        packed = random.integers(0, 255, (*shape[:-1], shape[-1] // (2 if kind == "U8" else 1)))
        stored = {"weight": (kind, packed.astype(np.float16 if kind == "F16" else np.uint8))}
        return stored | {scale: ("F32", np.ones((shape[0], 1), np.float32))}, np.ones(shape, np.float32)

    return form


def write(folder: Path, config: dict[str, Any], tensors: Stored) -> Path:
    folder.mkdir()
    header, parts, end = dict[str, Any](), list[bytes](), 0
    for name, (kind, array) in tensors.items():
        parts.append(np.ascontiguousarray(array).tobytes())
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": (end, end + len(parts[-1]))}
        if array.dtype == np.uint32 and kind not in ("U32", "I32"):
            header[name]["shape"] = (*array.shape[:-1], 4 * array.shape[-1])
        end += len(parts[-1])
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """The codes of each row one behind the other, the lowest bit first."""
    row = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(*codes.shape[:-1], -1)
    return np.packbits(row, -1, "little").view(np.uint32)


def _scaled(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (values * np.repeat(scales, values.shape[-1] // scales.shape[-1], -1)).astype(np.float32)
