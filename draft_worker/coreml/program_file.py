"""A saved .mlpackage as Python values: its functions' operations, types and constants. Runs nothing.

Reads Manifest.json, the model's protobuf and the weight file, like Core ML. A record of the weight file begins with 64
bytes that state the data's type, size and offset. Offsets and sizes are checked: a package may be damaged.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from draft_worker.coreml.package import Array
from draft_worker.coreml.toolchain import toolchain
from protocol.errors import InputError

_RECORD = struct.Struct("<IIQQ")
"""Sentinel, type, size in bytes, offset of the data."""
_SENTINEL = 0xDEADBEEF
_TYPES: dict[str, Any] = {
    "FLOAT16": np.float16,
    "FLOAT32": np.float32,
    "INT32": np.int32,
    "INT16": np.int16,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "UINT8": np.uint8,
    "BOOL": np.bool_,
}
_NIBBLES = "UINT4"

Constant: TypeAlias = Array | str


class TensorType(NamedTuple):
    """The type of a value. A dimension that is not fixed is -1."""

    shape: tuple[int, ...]
    kind: str
    """Core ML's name of the element type, for example FLOAT16."""


@dataclass(frozen=True)
class Operation:
    """One operation. `inputs` maps each parameter to the names of its values; concat's `values` has several."""

    type: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class FunctionFile:
    """One function: its constants by name, and its other operations in order."""

    name: str
    inputs: Mapping[str, TensorType]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    constants: Mapping[str, "StoredTensor"]
    types: Mapping[str, TensorType]
    """Types of all values in the function, including inputs."""


@dataclass(frozen=True)
class StoredTensor:
    """A constant, read on demand. Equal keys mean equal data, also in different functions."""

    file: "ProgramFile" = field(repr=False)
    tensor: TensorType
    key: int | bytes
    """Offset of its record in the weight file, or the data itself."""
    text: str | None = None

    def value(self) -> Constant:
        """Raises InputError if the weight file is damaged."""
        return self.text if self.text is not None else self.file.read(self)


class ProgramFile:
    """The functions of a saved ML program. Raises InputError if `path` is no ML program or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        root = _root(path)
        model = toolchain().model()
        try:
            model.ParseFromString(root.read_bytes())
        except toolchain().decode_error as error:
            raise self.damage(f"{root.name} can't be parsed") from error
        if not model.mlProgram.functions:
            raise self.damage("it holds no ML program")
        self.metadata: dict[str, str] = dict(model.description.metadata.userDefined)
        self.weights_size = 0
        self._kinds: dict[int, str] = {number: name for name, number in toolchain().data_type.items()}
        self._weights = self._open_weights(root.parent / "weights" / "weight.bin")
        functions = sorted(model.mlProgram.functions.items())
        try:
            self.functions = {name: self._function(name, function) for name, function in functions}
        except (IndexError, KeyError, ValueError, OverflowError) as error:
            raise self.damage(f"{root.name} is inconsistent") from error

    def damage(self, what: str) -> InputError:
        return InputError(f"{self.path} is damaged or no Core ML program ({what}): convert the model again.")

    def check_weights(self) -> None:
        """Raises InputError unless every constant lies within the weight file."""
        for function in self.functions.values():
            for stored in function.constants.values():
                if stored.text is None:
                    self._raw(stored)

    def read(self, stored: StoredTensor) -> Array:
        shape, kind = stored.tensor
        raw = self._raw(stored)
        if kind == _NIBBLES:
            # The first of two numbers is in the low four bits.
            values = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)[: math.prod(shape)]
        else:
            values = np.frombuffer(raw.tobytes(), _TYPES[kind])
        return values.reshape(shape)

    def _raw(self, stored: StoredTensor) -> Array:
        """The bytes of a constant, as many as its type needs."""
        shape, kind = stored.tensor
        if -1 in shape:
            raise self.damage(f"a constant has the shape {shape}")
        if kind != _NIBBLES and kind not in _TYPES:
            raise InputError(f"{self.path} has constants of type {kind}, which can't be read here.")
        raw = self._record(stored.key) if isinstance(stored.key, int) else np.frombuffer(stored.key, np.uint8)
        needed = (math.prod(shape) + 1) // 2 if kind == _NIBBLES else math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
        if len(raw) < needed:
            raise self.damage(f"a constant has {len(raw)} bytes, not {needed}")
        return raw[:needed]

    def _open_weights(self, path: Path) -> Array:
        if not path.is_file() or not path.stat().st_size:
            return np.zeros(0, np.uint8)
        self.weights_size = path.stat().st_size
        return np.memmap(path, np.uint8, "r")

    def _record(self, offset: int) -> Array:
        head = self._weights[offset : offset + _RECORD.size].tobytes()
        if len(head) < _RECORD.size:
            raise self.damage("weight.bin is truncated")
        sentinel, _, size, begin = _RECORD.unpack(head)
        if sentinel != _SENTINEL:
            raise self.damage(f"weight.bin has no record at {offset}")
        if begin + size > len(self._weights):
            raise self.damage("weight.bin is truncated")
        return self._weights[begin : begin + size]

    def _function(self, name: str, function: Any) -> FunctionFile:
        block = function.block_specializations[function.opset]
        types = {value.name: self._tensor(value.type) for value in function.inputs}
        constants: dict[str, StoredTensor] = {}
        operations = []
        for operation in block.operations:
            types |= {value.name: self._tensor(value.type) for value in operation.outputs}
            if operation.type == "const":
                constants[operation.outputs[0].name] = self._constant(operation.attributes["val"])
            else:
                operations.append(self._operation(operation, constants))
        return FunctionFile(
            name=name,
            inputs={value.name: types[value.name] for value in function.inputs},
            outputs=tuple(block.outputs),
            operations=tuple(operations),
            constants=constants,
            types=types,
        )

    def _operation(self, operation: Any, constants: dict[str, StoredTensor]) -> Operation:
        inputs: dict[str, tuple[str, ...]] = {}
        for parameter, argument in operation.inputs.items():
            names = []
            for index, binding in enumerate(argument.arguments):
                name = binding.name
                if binding.WhichOneof("binding") == "value":
                    name = f"{operation.outputs[0].name}.{parameter}.{index}"
                    constants[name] = self._constant(binding.value)
                names.append(name)
            inputs[parameter] = tuple(names)
        return Operation(operation.type, inputs, tuple(value.name for value in operation.outputs))

    def _tensor(self, value: Any) -> TensorType:
        kind = value.WhichOneof("type")
        if kind != "tensorType":
            return TensorType((), str(kind))
        return TensorType(tuple(_dimensions(value.tensorType)), self._kinds.get(value.tensorType.dataType, "?"))

    def _constant(self, value: Any) -> StoredTensor:
        tensor = self._tensor(value.type)
        if value.WhichOneof("value") == "blobFileValue":
            return StoredTensor(self, tensor, int(value.blobFileValue.offset))
        tensor_value = value.immediateValue.tensor
        kind = tensor_value.WhichOneof("value")
        if kind == "strings":
            return StoredTensor(self, tensor, b"", text=str(tensor_value.strings.values[0]))
        if kind == "bytes":
            return StoredTensor(self, tensor, bytes(tensor_value.bytes.values))
        if kind is None or tensor.kind not in _TYPES:
            raise self.damage(f"a constant of type {tensor.kind} has no value")
        return StoredTensor(self, tensor, np.array(getattr(tensor_value, kind).values, _TYPES[tensor.kind]).tobytes())


def _dimensions(tensor: Any) -> Iterator[int]:
    for dimension in tensor.dimensions:
        yield int(dimension.constant.size) if dimension.WhichOneof("dimension") == "constant" else -1


def _root(path: Path) -> Path:
    """The path of the model's protobuf, from the package's manifest."""
    try:
        manifest = json.loads((path / "Manifest.json").read_bytes())
        inside = Path(manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"])
    except OSError as error:
        raise InputError(
            f"{path} is no Core ML package ({error.strerror}): make one with `launch-pipeline convert`."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} has a broken Manifest.json: convert the model again.") from error
    root = path / "Data" / inside
    # Its files may be links, as in a hub's cache.
    if inside.is_absolute() or ".." in inside.parts or not root.is_file():
        raise InputError(f"{path} does not hold the model that its manifest names: convert the model again.")
    return root
