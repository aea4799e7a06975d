"""A package's functions as a Core AI program: each MIL operation in public operations of `coreai.authoring`.

Runs nothing. Computes as the package does, in fp16; norms are computed in fp32, because a square can overflow fp16 and
Core AI's public operations have no norm. Weights that a package holds compressed are written out in fp16.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any, TypeAlias

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.program_file import FunctionFile, Operation, ProgramFile
from draft_worker.coreml.runtime.backends.operations import EXPANSIONS
from protocol.errors import InputError

Node: TypeAlias = Any
"""A value of the program that is built, or a numpy constant: Core AI's operations take both."""
Parameters: TypeAlias = Mapping[str, Any]
Translation: TypeAlias = Callable[[Any, Parameters], Any]
"""From `coreai.authoring` and the parameters of an operation to the node, or the nodes, of its outputs."""
_TYPES = {"FLOAT16": np.float16, "FLOAT32": np.float32, "INT32": np.int32}


@cache
def authoring() -> Any:
    """Core AI's builder. Raises InputError where it is not installed."""
    try:
        return import_module("coreai.authoring")
    except ImportError as error:
        raise InputError(
            f"Core AI can't be imported ({error}): install coreai-core for macOS 27, or draft with --draft-engine mlx."
        ) from error


def program(file: ProgramFile, functions: Iterable[str]) -> Any:
    """An `AIProgram` with these functions of `file`. Raises InputError for an operation without a translation."""
    module = authoring().Module.create()
    with module:
        for name in functions:
            _Graph(file, file.functions[name]).add()
    return authoring().AIProgram(module)


class _Graph:
    """One function, translated operation by operation."""

    def __init__(self, file: ProgramFile, function: FunctionFile) -> None:
        if function.states:
            raise InputError(
                f"{file.path} keeps its cache as a state, which Core AI's public operations can't express yet: "
                "convert the model again with --kv io."
            )
        self._file = file
        self._function = function
        self._nodes: dict[str, Node] = {}

    def add(self) -> None:
        """Add the function to the module that is open. Core AI reads names and types from a signature."""
        names = list(self._function.inputs)

        def build(*inputs: Node) -> tuple[Node, ...]:
            self._nodes = dict(zip(names, inputs, strict=True))
            for operation in self._function.operations:
                self._translate(operation)
            return tuple(self._nodes[name] for name in self._function.outputs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        build.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        results = tuple(self._type(name) for name in self._function.outputs)
        build.__annotations__ = {name: self._type(name) for name in names} | {"return": tuple[results]}
        authoring().graph(build, provided_name=self._function.name)

    def _type(self, name: str) -> Any:
        shape, kind = self._function.types[name]
        tensor = authoring().TensorType(shape, _TYPES[kind], name=name)
        return Annotated[authoring().Value, tensor]

    def _translate(self, operation: Operation) -> None:
        parameters = {
            name: self._node(values[0]) if len(values) == 1 and name != "values" else [self._node(v) for v in values]
            for name, values in operation.inputs.items()
        }
        if operation.type in EXPANSIONS:
            self._nodes[operation.outputs[0]] = EXPANSIONS[operation.type](parameters)
            return
        translate = TRANSLATIONS.get(operation.type)
        if translate is None:
            raise InputError(
                f"{self._file.path} uses the operation {operation.type}, which is not translated to Core AI: "
                "convert the model with `launch-pipeline convert`."
            )
        found = translate(authoring(), parameters)
        self._nodes |= zip(operation.outputs, found if isinstance(found, list) else [found], strict=True)

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            self._nodes[name] = self._function.constants[name].value()
        return self._nodes[name]


def _signed(values: Any) -> Array:
    return np.array(values, np.int32).reshape(-1)


def _unsigned(values: Any) -> Array:
    return np.array(values, np.uint32).reshape(-1)


def _axis(value: Any) -> Array:
    return np.array(int(value), np.int32)


def _sizes(node: Node) -> Sequence[int]:
    return node.shape if isinstance(node, np.ndarray) else node.type.shape


def _swapped(ai: Any, node: Node) -> Node:
    order = [*range(len(_sizes(node)) - 2), len(_sizes(node)) - 1, len(_sizes(node)) - 2]
    return ai.transpose(node, _unsigned(order))


def _conv(ai: Any, given: Parameters) -> Node:
    """Strides, dilations and groups of 1: convert makes no others."""
    one = np.ones(2, np.uint32)
    product = ai.conv2d(given["x"], given["weight"], one, one, np.array(1, np.uint32))
    bias = given.get("bias")
    return product if bias is None else ai.broadcasting_add(product, bias.reshape(1, -1, 1, 1))


def _matmul(ai: Any, given: Parameters) -> Node:
    x = _swapped(ai, given["x"]) if given.get("transpose_x") else given["x"]
    y = _swapped(ai, given["y"]) if given.get("transpose_y") else given["y"]
    return ai.broadcasting_batch_matmul(x, y)


def _layer_norm(ai: Any, given: Parameters) -> Node:
    x, axes = ai.cast(given["x"], np.float32), _signed(given["axes"])
    kept = [1 if axis in axes else size for axis, size in enumerate(_sizes(x))]

    def mean(node: Node) -> Node:
        return ai.reshape(ai.reduce_mean(node, axes), _unsigned(kept))

    centred = ai.broadcasting_sub(x, mean(x))
    variance = mean(ai.broadcasting_mul(centred, centred))
    factor = ai.rsqrt(ai.broadcasting_add(variance, np.float32(given["epsilon"])))
    return ai.cast(ai.broadcasting_mul(centred, factor), np.float16)


def _gelu(ai: Any, given: Parameters) -> Node:
    """`convert` writes the approximation alone."""
    return ai.gelu(given["x"], approximate="tanh")


def _reduce_sum(ai: Any, given: Parameters) -> Node:
    """With `keep_dims`, as `convert` writes it."""
    x, axes = given["x"], _signed(given["axes"])
    kept = [1 if axis in axes else size for axis, size in enumerate(_sizes(x))]
    return ai.reshape(ai.reduce_sum(x, axes), _unsigned(kept))


def _split(ai: Any, given: Parameters) -> list[Node]:
    axis, parts = int(given["axis"]), int(given["num_splits"])
    return ai.split(given["x"], np.array(_sizes(given["x"])[axis] // parts, np.uint32), _axis(axis))


def _slice_by_size(ai: Any, given: Parameters) -> Node:
    begin = _signed(given["begin"])
    return ai.slice_(given["x"], begin, begin + _signed(given["size"]), np.ones(len(begin), np.int32))


TRANSLATIONS: dict[str, Translation] = {
    "add": lambda ai, given: ai.broadcasting_add(given["x"], given["y"]),
    "mul": lambda ai, given: ai.broadcasting_mul(given["x"], given["y"]),
    "real_div": lambda ai, given: ai.broadcasting_divide(given["x"], given["y"]),
    "maximum": lambda ai, given: ai.broadcasting_maximum(given["x"], given["y"]),
    "minimum": lambda ai, given: ai.broadcasting_minimum(given["x"], given["y"]),
    "silu": lambda ai, given: ai.silu(given["x"]),
    "gelu": _gelu,
    "tanh": lambda ai, given: ai.tanh(given["x"]),
    "reduce_sum": _reduce_sum,
    "softmax": lambda ai, given: ai.softmax(given["x"], _axis(given["axis"])),
    "layer_norm": _layer_norm,
    "conv": _conv,
    "matmul": _matmul,
    "reshape": lambda ai, given: ai.reshape(given["x"], _unsigned(given["shape"])),
    "transpose": lambda ai, given: ai.transpose(given["x"], _unsigned(given["perm"])),
    "split": _split,
    "concat": lambda ai, given: ai.concat(_axis(given["axis"]), given["values"]),
    "slice_by_size": _slice_by_size,
    "identity": lambda _, given: given["x"],
}
"""By MIL operation: those that `launch-pipeline convert` writes."""
