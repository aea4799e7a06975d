"""Selects the runtime of a converted model; the executor as a runtime. Core ML is in `apple`.

A new runtime is a class like `ExecutorRuntime` and a case of `open_runtime`.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import numpy as np

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Array
from draft_worker.coreml.program_file import FunctionFile, Operation, ProgramFile, StoredTensor, TensorType
from draft_worker.coreml.runtime.calls import Runtime
from draft_worker.coreml.runtime.operations import EXPANSIONS, OPERATIONS, OperationFunction
from protocol.contracts.coreml import RuntimeName
from protocol.errors import InputError

Precision: TypeAlias = Literal["fp16", "fp32"]
"""fp16 rounds inputs and every result, like the package; fp32 computes without rounding to fp16."""
_DTYPES: dict[Precision, mx.Dtype] = {"fp16": mx.float16, "fp32": mx.float32}


class ExecutorRuntime:
    """Runs a package on any machine, to check its graph. Its functions share constants.

    `load` raises InputError for a damaged weight file and for an operation that the executor does not support.
    """

    name = "executor"

    def __init__(self, file: ProgramFile, precision: Precision = "fp16") -> None:
        kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
        self.device = f"{kind}, by the executor: no Neural Engine"
        self._file = file
        self._constants = _Constants()
        self._precision: Precision = precision
        self._loaded: dict[str, ProgramFunction] = {}

    def load(self, function: str) -> None:
        if function in self._loaded:
            return
        if function not in self._file.functions:
            known = ", ".join(self._file.functions)
            raise InputError(f"{self._file.path} has no function {function} (it has {known}): convert the model again.")
        held = self._file.functions[function]
        self._loaded[function] = ProgramFunction(self._file, held, self._constants, self._precision)

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.load(function)
        return self._loaded[function].predict(inputs)


class ProgramFunction:
    """One function of a package, with Core ML's call, `predict`."""

    def __init__(
        self, file: ProgramFile, function: FunctionFile, constants: "_Constants", precision: Precision
    ) -> None:
        self.inputs: Mapping[str, TensorType] = function.inputs
        self.outputs = function.outputs
        self._path = file.path
        self._dtype = _DTYPES[precision]
        self._registers: list[mx.array | None] = [None]
        self._places: dict[str, int] = {}
        for name in function.inputs:
            self._place(name)
        self._steps = [self._step(operation, function, constants) for operation in _ordered(function, constants)]

    def predict(self, data: Mapping[str, Array]) -> dict[str, Array]:
        """Run one call. Raises InputError for an input that is missing or has another shape."""
        registers = self._registers.copy()
        for name in self.inputs:
            registers[self._places[name]] = self._input(name, data)
        for step in self._steps:
            step(registers)
        outputs: dict[str, Any] = {name: registers[self._places[name]] for name in self.outputs}
        mx.eval(outputs)
        return {name: np.array(value) for name, value in outputs.items()}

    def _input(self, name: str, data: Mapping[str, Array]) -> mx.array:
        shape, kind = self.inputs[name]
        if name not in data:
            raise InputError(f"The input {name} of {self._path} is missing.")
        given = data[name]
        if given.shape != shape:
            raise InputError(f"The input {name} of {self._path} must have shape {shape}, not {given.shape}.")
        return mx.array(given).astype(mx.int32 if kind == "INT32" else self._dtype)

    def _place(self, name: str) -> int:
        """The register of a value; a new register for a new name."""
        if name not in self._places:
            self._places[name] = len(self._registers)
            self._registers.append(None)
        return self._places[name]

    def _step(
        self, operation: Operation, function: FunctionFile, constants: "_Constants"
    ) -> Callable[[list[Any]], None]:
        rule = OPERATIONS.get(operation.type)
        if rule is None:
            raise InputError(
                f"{self._path} uses the operation {operation.type}, which the executor does not support: "
                "convert the model with `launch-pipeline convert`."
            )
        try:
            run = rule.bind(constants.settings(operation, function, rule.tensors))
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{self._path} uses {operation.type} in a form that the executor does not support: {error}."
            ) from error
        if not rule.moves:
            run = _rounded(run, self._dtype)
        sources = [self._source(name, function, constants) for name in _arguments(operation, rule.tensors)]
        return _writing(run, sources, [self._place(name) for name in operation.outputs])

    def _source(self, name: str | None, function: FunctionFile, constants: "_Constants") -> int:
        if name is None:
            return 0
        place = self._place(name)
        if self._registers[place] is None and constants.contains(name, function):
            self._registers[place] = constants.tensor(name, function)
        return place


class _Constants:
    """Constants as MLX arrays, one array for equal data. Floats are fp32, which represents every fp16 number."""

    def __init__(self) -> None:
        self._arrays: dict[Any, mx.array] = {}
        self._expansions: dict[tuple[str, str], Operation] = {}

    def add(self, expansion: Operation, function: FunctionFile) -> None:
        self._expansions[function.name, expansion.outputs[0]] = expansion

    def contains(self, name: str, function: FunctionFile) -> bool:
        return name in function.constants or (function.name, name) in self._expansions

    def tensor(self, name: str, function: FunctionFile) -> mx.array:
        expansion = self._expansions.get((function.name, name))
        parts = [name] if expansion is None else [part for names in expansion.inputs.values() for part in names]
        key = tuple((stored.key, stored.tensor) for stored in (function.constants[part] for part in parts))
        if key not in self._arrays:
            value: Any = (
                function.constants[name].value()
                if expansion is None
                else EXPANSIONS[expansion.type](self.settings(expansion, function, ()))
            )
            self._arrays[key] = mx.array(value.astype(np.float32) if value.dtype == np.float16 else value)
        return self._arrays[key]

    def settings(self, operation: Operation, function: FunctionFile, tensors: tuple[str, ...]) -> dict[str, Any]:
        """The parameters of `operation` without those in `tensors`."""
        found = {name: value for name, value in operation.inputs.items() if name not in tensors}
        return {name: _constant(function.constants, value).value() for name, value in found.items()}


def _ordered(function: FunctionFile, constants: _Constants) -> list[Operation]:
    """The operations of each call. Adds the operations that only expand constants to `constants`."""
    every_call = []
    for operation in function.operations:
        if operation.type in EXPANSIONS:
            constants.add(operation, function)
        else:
            every_call.append(operation)
    return every_call


def _constant(constants: Mapping[str, StoredTensor], names: tuple[str, ...]) -> StoredTensor:
    if len(names) != 1 or names[0] not in constants:
        raise ValueError("a parameter that must be constant is computed")
    return constants[names[0]]


def _arguments(operation: Operation, tensors: tuple[str, ...]) -> list[str | None]:
    names: list[str | None] = []
    for parameter in tensors:
        names += operation.inputs.get(parameter, (None,))
    return names


def _rounded(run: OperationFunction, dtype: mx.Dtype) -> OperationFunction:
    """`run` in fp32, which is fast on every device, with its result rounded once. Integers stay as they are."""

    def rounded(*arguments: mx.array | None) -> mx.array:
        result = run(*(a if a is None or not _is_float(a) else a.astype(mx.float32) for a in arguments))
        return result.astype(dtype) if _is_float(result) else result

    return rounded


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def _writing(run: OperationFunction, sources: list[int], targets: list[int]) -> Callable[[list[Any]], None]:
    if len(targets) <= 1:

        def one(registers: list[Any]) -> None:
            registers[targets[0]] = run(*[registers[source] for source in sources])

        return one

    def several(registers: list[Any]) -> None:
        for target, value in zip(targets, run(*[registers[source] for source in sources]), strict=True):
            registers[target] = value

    return several


def open_runtime(converted: Converted, name: RuntimeName | None = None) -> Runtime:
    """The runtime of that name; by default Core ML on a Mac, the executor elsewhere."""
    match name or default_runtime():
        case "coreml":
            from draft_worker.coreml.runtime.apple import CoreMlRuntime

            return CoreMlRuntime(converted)
        case "executor":
            return ExecutorRuntime(converted.file)


def default_runtime() -> RuntimeName:
    return "coreml" if sys.platform == "darwin" else "executor"
