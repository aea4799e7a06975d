"""The files of a trained drafter: config.json and safetensors, checked on reading, written in the published form.

Knows no kind of drafter.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from draft_worker.head_tokens import HeadTokens, are_head_tokens
from protocol.errors import InputError
from protocol.inference.device import spare_compiler
from protocol.inference.narrow_weights import keep_narrow

_Config = TypeVar("_Config")
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_UNFINISHED = "unfinished"
"""A folder in the drafter's, since readers take every safetensors file beside config.json."""
_NEXT = "download it again, or choose another draft"


class Quantization(msgspec.Struct, frozen=True):
    """How mlx-lm's tools quantised the weights that have scales."""

    group_size: int = 64
    bits: int = 4


class DrafterFolder:
    """A folder that is said to hold `kind`, half a sentence such as "a DFlash drafter"."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind

    def wrong(self, reason: str) -> InputError:
        return InputError(f"{self.folder} is said to hold {self.kind}, but {reason}: {_NEXT}.")

    def raw_config(self) -> dict[str, Any]:
        """Raises InputError if config.json is missing or damaged, as do the other methods for what they read."""
        try:
            config = json.loads((self.folder / _CONFIG).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise self.wrong(f"its {_CONFIG} can't be read ({error})") from error
        if not isinstance(config, dict):
            raise self.wrong(f"its {_CONFIG} is no JSON object")
        return config

    def decoded(self, config: Mapping[str, Any], form: type[_Config]) -> _Config:
        """The fields of a config as a struct."""
        try:
            return msgspec.convert(config, form)
        except (msgspec.ValidationError, ValueError) as error:
            raise self.wrong(f"its {_CONFIG} does not fit ({error})") from error

    def tensors(self) -> dict[str, mx.array]:
        """By their names, not read yet."""
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise self.wrong("it has no safetensors file, and weights in other formats are never opened")
        tensors: dict[str, mx.array] = {}
        for file in files:
            try:
                loaded: Any = mx.load(str(file))
            except (OSError, RuntimeError, ValueError) as error:
                raise self.wrong(f"{file.name} can't be read ({str(error)[:200]})") from error
            tensors |= {name.removeprefix("model."): values for name, values in loaded.items()}
        return tensors

    def head_tokens(
        self, tensors: dict[str, mx.array], vocabulary: int, by_column: tuple[str, ...] = ("lm_head.",)
    ) -> HeadTokens | None:
        """The tokens of a reduced head's columns, ascending, from the table d2t; None without one.

        Takes the table out of `tensors`, and sorts the rows of those whose names begin with one of `by_column`.
        """
        if "d2t" not in tensors:
            return None
        offsets = tensors.pop("d2t")
        if offsets.ndim != 1 or not mx.issubdtype(offsets.dtype, mx.integer):
            raise self.wrong("its tensor d2t is no list of whole numbers")
        tokens: Any = np.array(offsets).astype(np.int64) + np.arange(offsets.size)
        order = np.argsort(tokens)
        if not are_head_tokens(tokens[order], vocabulary):
            raise self.wrong(f"its tensor d2t must name different tokens below {vocabulary}")
        for name in [name for name in tensors if name.startswith(by_column)]:
            if tensors[name].ndim == 0 or len(tensors[name]) != len(order):
                raise self.wrong(f"its tensor {name} does not have a row for each of the {len(order)} tokens of d2t")
            tensors[name] = tensors[name] if (np.diff(order) == 1).all() else tensors[name][mx.array(order)]
        return tokens[order].astype(np.int32)

    def fill(
        self,
        network: nn.Module,
        tensors: Mapping[str, mx.array],
        quantization: Quantization | None,
        stated: Callable[[str], str] = str,
    ) -> None:
        """Give a network its parameters, all of `tensors`, in the element that this machine computes in. `stated`: the
        name that a tensor has in the files."""
        quantized = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
        if quantized:
            self._quantize(network, quantization or Quantization(), lambda path, _: path in quantized)
        self._check(network, tensors, stated)
        network.load_weights(list(tensors.items()))
        if mx.default_device() == mx.Device(mx.cpu):
            # A processor has fast kernels for float32 alone; quantized products are many times slower.
            dequantize_model(network)
            network.set_dtype(mx.float32)
            spare_compiler()
        finite = {name: mx.isfinite(values).all() for name, values in parameters(network) if _is_float(values)}
        try:
            mx.eval(network.parameters(), finite)
        except (RuntimeError, ValueError) as error:
            raise self.wrong(f"its weights can't be read ({str(error)[:200]})") from error
        for name, good in finite.items():
            if not good.item():
                raise self.wrong(f"its tensor {stated(name)} holds numbers that are not finite")
        keep_narrow(network)

    def _quantize(self, network: nn.Module, form: Quantization, which: Callable[[str, nn.Module], bool]) -> None:
        try:
            nn.quantize(network, form.group_size, form.bits, class_predicate=which)
        except (ValueError, RuntimeError) as error:
            raise self.wrong(f"its {_CONFIG} states a quantization that does not fit ({error})") from error

    def _check(self, network: nn.Module, tensors: Mapping[str, mx.array], stated: Callable[[str], str]) -> None:
        expected = dict(parameters(network))
        for name, values in expected.items():
            if name not in tensors:
                raise self.wrong(f"it lacks the tensor {stated(name)}")
            found, shape = tensors[name], values.shape
            if found.shape != shape:
                raise self.wrong(f"its tensor {stated(name)} has the shape {found.shape} instead of {shape}")
            if _is_float(values) != _is_float(found):
                raise self.wrong(f"its tensor {stated(name)} has elements of type {found.dtype}")
        unknown = [name for name in tensors if name not in expected]
        if unknown:
            raise self.wrong(f"it has a tensor that its form does not know, {stated(unknown[0])}")


def save(folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, mx.array]]) -> None:
    """Write a drafter's folder. Files are replaced when all are written, config.json last.

    Raises OSError, with the file, if they can't be written.
    """
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write_tensors(unfinished / _WEIGHTS, dict(tensors))
        (unfinished / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name in (_WEIGHTS, _CONFIG):
            (unfinished / name).replace(folder / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tensors(file: Path, tensors: dict[str, mx.array]) -> None:
    mx.eval(tensors)
    try:
        mx.save_safetensors(str(file), tensors, metadata={"format": "pt"})
    except RuntimeError as error:
        # MLX raises it for a full disk.
        raise OSError(f"{file}: {error}") from error


def parameters(network: nn.Module) -> list[tuple[str, mx.array]]:
    """A network's parameters by their names in files."""
    flat: Any = tree_flatten(network.parameters())
    return flat


def _is_float(values: mx.array) -> bool:
    return mx.issubdtype(values.dtype, mx.floating)
