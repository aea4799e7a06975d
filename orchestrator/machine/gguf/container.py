"""A GGUF file's metadata and where each tensor's bytes are. Knows no architecture, and trusts no number of the file."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from orchestrator.machine.gguf import part_names
from protocol.errors import InputError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"},
    **{6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"},
}
"""Types of metadata values as numpy writes them."""
_LEAST_STRING_BYTES = 8


class GgufTensor(NamedTuple):
    """`shape`: rows first. `rows`: (R, bytes of a row) uint8 as in the file; a vector has one element a row."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: np.ndarray[Any, np.dtype[np.uint8]]
    factors: np.ndarray[Any, np.dtype[np.float32]] | None = None
    """Of each row, which its numbers are multiplied by."""


class Laid(NamedTuple):
    """How the numbers of an mlx-lm array lie in a tensor of the file."""

    shape: tuple[int, ...]
    """mlx-lm's."""
    rows: Any = None
    """Where each row stands in the file, in mlx-lm's order; None: all of them, in order."""
    columns: Any = None
    """The same of columns."""
    value: Callable[[Any], Any] | None = None
    """mlx-lm's numbers from the file's; None: the same."""
    whole: bool = False
    """`value` needs all rows at once."""
    exact: bool = False
    """The numbers keep 32 bits."""


class GgufFile(NamedTuple):
    """What the file says. The tensors' bytes stay on the disk until they are read."""

    path: Path
    metadata: dict[str, Any]
    """By key: numbers, texts, lists of texts, numpy arrays of numbers."""
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The model in a file, or in the parts beside it of which it is one.

    Raises InputError for a file that is missing, can't be read, is cut off or broken, or has tensors of unknown types,
    and for parts of several models.
    """
    names = part_names(path.name)
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing and len(names) > 1:
        raise InputError(
            f"{path} is one of {len(names)} parts, and {len(missing)} of them are missing, first {missing[0]}: "
            "download them into the same folder."
        )
    files = [_read(path.with_name(name)) for name in names]
    first = files[0]
    count = first.metadata.get("split.count", 1)
    if count not in (0, 1, len(names)):
        raise InputError(
            f"{path} is one of {count} parts, which its name does not say: give the parts back the names that end in "
            f"-00001-of-{count:05}.gguf and so on."
        )
    for number, part in enumerate(files):
        for key, value in part.metadata.items():
            expected: Any = number if key == "split.no" else first.metadata.get(key)
            if value is not expected and not np.array_equal(value, expected):
                raise InputError(
                    f"{part.path} is not part {number + 1} of the model of {first.path.name}, by {key}: download the "
                    "parts again."
                )
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    found = sum(len(file.tensors) for file in files)
    whole = first.metadata.get("split.tensors.count", found)
    if not whole == found == len(tensors):
        raise InputError(f"{path} has {len(tensors)} of {max(whole, found)} tensors in its parts: download them again.")
    return first._replace(tensors=_with_factors(tensors))


def _with_factors(tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
    """NVFP4 has a scale of the whole matrix, or of each expert's, and one of activations, in tensors of their own."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.kind != GGMLQuantizationType.NVFP4:
            continue
        stem = name.removesuffix(".weight")
        found.pop(f"{stem}.input_scale", None)
        scale = found.pop(f"{stem}.scale", None)
        if scale is not None:
            factors = np.frombuffer(scale.rows.tobytes(), "<f4")
            rows = np.repeat(factors, len(tensor.rows) // len(factors))
            found[name] = tensor._replace(factors=None if (rows == 1).all() else rows)
    return found


def _read(path: Path) -> GgufFile:
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is empty"
        raise InputError(f"{path} can't be read ({reason}): check the file.") from error
    try:
        return _parsed(path, data)
    except (struct.error, IndexError, _CutOff) as error:
        raise InputError(f"{path} is cut off: download it again.") from error
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is broken ({error}): download it again.") from error


class _CutOff(Exception):
    """The file ends before what it announces."""


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if size > len(self.data) - self.at:
            raise _CutOff
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, form: str, count: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.take(np.dtype(form).itemsize * count), form)

    def integer(self, form: str = "<u8") -> int:
        return int(self.numbers(form, 1)[0])

    def text(self) -> str:
        # Vocabularies hold tokens that are no UTF-8.
        return self.take(self.integer()).tobytes().decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(_number(kind), 1)[0].item()
        inner, count = self.integer("<u4"), self.integer()
        if inner not in (_STRING, _ARRAY):
            return self.numbers(_number(inner), count)
        if count * _LEAST_STRING_BYTES > len(self.data) - self.at:
            raise _CutOff
        if depth:
            raise ValueError("lists in lists of lists")
        return [self.value(inner, depth + 1) for _ in range(count)]


def _number(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"metadata of the unknown type {kind}")
    return _NUMBERS[kind]


def _parsed(path: Path, data: np.ndarray[Any, np.dtype[np.uint8]]) -> GgufFile:
    cursor = _Cursor(data)
    if data[: len(_MAGIC)].tobytes() != _MAGIC:
        raise InputError(f"{path} is no GGUF file: pass a GGUF file, or the folder of a model in mlx-lm's format.")
    cursor.take(len(_MAGIC))
    version = cursor.integer("<u4")
    if version not in _VERSIONS:
        raise InputError(f"{path} is GGUF of version {version}, and 2 and 3 can be read: download a newer conversion.")
    tensors, values = cursor.integer(), cursor.integer()
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"{key} twice")
        metadata[key] = cursor.value(cursor.integer("<u4"))
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    begin = -(-cursor.at // alignment) * alignment
    found = {entry.name: _tensor(data[begin:], entry) for entry in entries}
    if len(found) < len(entries):
        raise ValueError("two tensors of one name")
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        # Many tensors over the same bytes would become a folder that fills the disk.
        if entry.offset < end:
            raise ValueError(f"{entry.name} lies over another tensor")
        end = entry.offset + found[entry.name].rows.nbytes
    return GgufFile(path, metadata, found)


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


def _entry(cursor: _Cursor) -> _Entry:
    name = cursor.text()
    dimensions = cursor.integer("<u4")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    # The file has the fastest axis first.
    shape = tuple(int(size) for size in reversed(cursor.numbers("<u8", dimensions)))
    number = cursor.integer("<u4")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise InputError(
            f"The tensor {name} has the unknown quantisation {number}: choose a file in Q4_0, Q8_0 or F16."
        ) from error
    return _Entry(name, shape, kind, cursor.integer())


def _tensor(data: np.ndarray[Any, np.dtype[np.uint8]], entry: _Entry) -> GgufTensor:
    block, size = GGML_QUANT_SIZES[entry.kind]
    *_, last = entry.shape
    columns = last if len(entry.shape) > 1 or block > 1 else 1
    elements = int(np.prod(entry.shape, dtype=object))
    if not elements or columns % block:
        raise ValueError(f"{entry.name} has the shape {entry.shape}")
    length = elements // block * size
    if entry.offset + length > len(data):
        raise _CutOff
    rows = data[entry.offset : entry.offset + length].reshape(elements // columns, -1)
    return GgufTensor(entry.name, entry.shape, entry.kind, rows)
