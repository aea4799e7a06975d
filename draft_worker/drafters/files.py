"""The files of a trained drafter: tensors, checked on reading, and what is written in the published form.

Knows no kind of drafter. `protocol.contracts.drafters` reads config.json.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from draft_worker.short_head import HeadTokens, are_head_tokens
from protocol.contracts.drafters.checkpoint import UNUSED, damaged
from protocol.contracts.drafters.description import BlockForm, Eagle3Form, MtpForm
from protocol.contracts.drafters.detection import read_drafter
from protocol.errors import InputError
from protocol.inference.narrow_weights import keep_narrow
from protocol.inference.packed_weights import form_of
from protocol.inference.stored_model import ready_for_processor

_Form = TypeVar("_Form", BlockForm, Eagle3Form, MtpForm)
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_UNFINISHED = "unfinished"
"""A folder in the drafter's, since readers take every safetensors file beside config.json."""


class DrafterFolder(Generic[_Form]):
    """The folder of a drafter with a network of this form. Raises InputError if it holds none."""

    def __init__(self, folder: Path, form: type[_Form]) -> None:
        drafter = read_drafter(folder, with_own_head=form is MtpForm)
        if drafter is None or not isinstance(drafter.form, form):
            held = "an ordinary language model" if drafter is None else drafter.name
            raise InputError(f"{folder} holds {held}, which this draft engine can't run: leave out the engine.")
        self.folder = folder
        self.drafter = drafter
        self.form: _Form = drafter.form

    def wrong(self, reason: str) -> InputError:
        return damaged(self.folder, self.drafter.name, reason)

    def tensors(self) -> dict[str, mx.array]:
        """By their names, not read yet. Raises InputError if they can't be read, as the other methods do."""
        tensors: dict[str, mx.array] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                loaded: Any = mx.load(str(file))
            except (OSError, RuntimeError, ValueError) as error:
                raise self.wrong(f"{file.name} can't be read ({str(error)[:200]})") from error
            tensors |= {name.removeprefix("model."): values for name, values in loaded.items()}
        return {name: values for name, values in tensors.items() if name.split(".")[0] not in UNUSED}

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
        stated: Callable[[str], str] = str,
    ) -> None:
        """Give a network its parameters, all of `tensors`, in the one type that this machine computes in. `stated`: the
        name that a tensor has in the files."""
        packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
        try:
            nn.quantize(network, class_predicate=lambda path, each: path in packed and form_of(path, each, tensors))
        except (ValueError, RuntimeError, LookupError, ZeroDivisionError) as error:
            raise self.wrong(f"its packed tensors don't fit its sizes ({error})") from error
        self._check(network, tensors, stated)
        network.load_weights(list(_in_one_type(tensors)))
        ready_for_processor(network)
        finite = {name: mx.isfinite(values).all() for name, values in parameters(network) if _is_float(values)}
        try:
            mx.eval(network.parameters(), finite)
        except (RuntimeError, ValueError) as error:
            raise self.wrong(f"its weights can't be read ({str(error)[:200]})") from error
        for name, good in finite.items():
            if not good.item():
                raise self.wrong(f"its tensor {stated(name)} holds numbers that are not finite")
        keep_narrow(network)

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


def _in_one_type(tensors: Mapping[str, mx.array]) -> Iterable[tuple[str, mx.array]]:
    """In the narrowest type that one has: a norm of 32 bits makes float32 of all that follows. As mlx-lm's conversions,
    leaves out what decides between experts."""
    found = (each.dtype for each in tensors.values() if _is_float(each))
    element = min(found, key=lambda kind: kind.size, default=mx.float32)
    for name, values in tensors.items():
        cast = _is_float(values) and not name.endswith("e_score_correction_bias")
        yield name, values.astype(element) if cast else values


def _is_float(values: mx.array) -> bool:
    return mx.issubdtype(values.dtype, mx.floating)
