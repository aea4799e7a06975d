"""Finds the parts of a saved program that would not run on the Neural Engine. Reads a program; runs nothing.

Core ML moves an operation to the CPU without a message, so these rules check the program in advance. They come from
Apple's "Deploying Transformers on the Apple Neural Engine", coremltools' documentation and reports of several projects.
On a Mac, `MLComputePlan` and timing decide.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from draft_worker.coreml.program_file import FunctionFile, ProgramFile, StoredTensor, TensorType


class Finding(NamedTuple):
    """One violation of a rule of the Neural Engine."""

    severity: Literal["error", "warning"]
    """error: runs off the Neural Engine, or Core ML refuses it; warning: slower, or only some systems accept it."""
    rule: str
    function: str
    """Empty for the whole package."""
    where: str
    """An operation, value or file."""
    reason: str


_NATIVE = frozenset(
    (
        *("conv", "matmul", "add", "sub", "mul", "real_div", "maximum", "minimum", "abs", "square", "sqrt", "rsqrt"),
        *("softmax", "silu", "sigmoid", "tanh", "relu", "gelu", "reduce_mean", "reduce_max", "reduce_sum"),
        *("layer_norm", "reshape", "transpose", "split", "concat", "slice_by_size", "slice_by_index"),
        *("expand_dims", "squeeze", "identity"),
        *("constexpr_lut_to_dense", "constexpr_blockwise_shift_scale"),
    )
)
_FOREIGN = {
    "gather": "a look-up by computed index runs on the processor",
    "gather_along_axis": "a look-up by computed index runs on the processor",
    "gather_nd": "a look-up by computed index runs on the processor, or gives wrong numbers",
    "scatter_nd": "its compiler rejects writes to computed indices",
    "topk": "sorting runs on the processor, and in fp16 programs indices wrap at 65,535",
    "reduce_argmax": "argmax over a vocabulary runs on the processor and takes longer than returning the logits",
    "cast": "a cast moves the computation to another device",
    "select": "choosing by condition runs on the processor",
    "greater_equal": "comparing runs on the processor",
    "linear": "a product has the fast layout only as a 1x1 convolution on (1, channels, 1, length)",
}
_FLOAT = "FLOAT16"
_LONGEST_AXIS = 16_384
_MOST_AXES = 5
_ALIGNMENT = 64
_MAX_PADDING = 1 << 20
"""Bytes of padding in one input or output above which a finding is reported."""
_LARGEST_WEIGHTS = 1 << 30
_SMALLEST_NORMAL = 2.0**-14
"""Below this, fp16 numbers lose digits, and the device may flush them to 0."""
_LARGEST_BIAS = 3e4
"""Added twice, a larger number exceeds fp16's range."""


def lint(file: ProgramFile) -> list[Finding]:
    """All findings, errors first. Raises InputError for a damaged weight file."""
    findings = list(_weights(file))
    for function in file.functions.values():
        for rule in (operations, tensors, channels, interface, numbers):
            findings += rule(function)
    return sorted(findings, key=lambda finding: finding.severity)


def _weights(file: ProgramFile) -> Iterator[Finding]:
    if file.weights_size > _LARGEST_WEIGHTS:
        reason = f"{file.weights_size / 2**30:.1f} GiB of weights; above 1 GiB, loading on the device often fails"
        yield Finding("warning", "package size", "", "weight.bin", reason)


def operations(function: FunctionFile) -> Iterator[Finding]:
    for operation in function.operations:
        where = f"{operation.type} {operation.outputs[0] if operation.outputs else ''}".strip()
        if operation.type in _FOREIGN:
            yield Finding("error", "operation", function.name, where, _FOREIGN[operation.type])
        elif operation.type not in _NATIVE:
            yield Finding("error", "operation", function.name, where, "it is not known to run on the Neural Engine")
        elif operation.type == "constexpr_blockwise_shift_scale" and any(
            size > 1 for size in _tensor(operation.inputs["scale"][0], function).shape[1:]
        ):
            reason = "scales of blocks within a channel run on the GPU only; use one scale for each channel"
            yield Finding("error", "weight form", function.name, where, reason)


def tensors(function: FunctionFile) -> Iterator[Finding]:
    for name, tensor in function.types.items():
        if name in function.constants:
            continue
        if -1 in tensor.shape:
            yield Finding("error", "static shape", function.name, name, f"{_show(tensor)}: shapes must be fixed")
        if len(tensor.shape) > _MOST_AXES:
            yield Finding("error", "axes", function.name, name, f"{_show(tensor)}: at most {_MOST_AXES} axes")
        if max(tensor.shape, default=0) > _LONGEST_AXIS:
            reason = f"{_show(tensor)}: no axis may be longer than {_LONGEST_AXIS}"
            yield Finding("error", "axis length", function.name, name, reason)
        if tensor.kind != _FLOAT:
            reason = f"{_show(tensor)}: the Neural Engine computes only in fp16"
            yield Finding("error", "element type", function.name, name, reason)


def channels(function: FunctionFile) -> Iterator[Finding]:
    """Kernels. The rules for tensors skip them, because they are constants or expanded from constants."""
    for operation in function.operations:
        if operation.type != "conv":
            continue
        kernel = _tensor(operation.inputs["weight"][0], function)
        if max(kernel.shape[:2]) > _LONGEST_AXIS:
            reason = f"a kernel of {_show(kernel)}: split it into kernels of at most {_LONGEST_AXIS} channels"
            yield Finding("error", "channels", function.name, operation.outputs[0], reason)


def _tensor(name: str, function: FunctionFile) -> TensorType:
    stored = function.constants.get(name)
    return stored.tensor if stored else function.types[name]


def interface(function: FunctionFile) -> Iterator[Finding]:
    """Core ML pads the last axis of inputs and outputs to 64 bytes."""
    for name in (*function.inputs, *function.outputs):
        shape, kind = function.types[name]
        if kind != _FLOAT or not shape or -1 in shape:
            continue
        rows, row = math.prod(shape[:-1]), 2 * shape[-1]
        padded = -(-row // _ALIGNMENT) * _ALIGNMENT
        if rows * (padded - row) > _MAX_PADDING:
            reason = f"{_show(function.types[name])}: padded from {rows * row} to {rows * padded} bytes"
            yield Finding("warning", "alignment", function.name, name, reason)


def numbers(function: FunctionFile) -> Iterator[Finding]:
    bounds = {name for one in function.operations if one.type in ("maximum", "minimum") for name in one.inputs["y"]}
    for name, stored in function.constants.items():
        # The conversion already rejected weights beyond fp16's range; only the numbers outside weight.bin remain.
        if (
            name not in bounds
            and stored.text is None
            and stored.tensor.kind == _FLOAT
            and isinstance(stored.key, bytes)
        ):
            yield from _number(function.name, name, stored)


def _number(function: str, name: str, stored: StoredTensor) -> Iterator[Finding]:
    values = np.abs(np.asarray(stored.value(), np.float32))
    largest, smallest = float(values.max(initial=0)), float(values.min(initial=1))
    if not largest <= _LARGEST_BIAS:
        reason = f"{largest:g} is near or beyond fp16's range, and a sum with it becomes NaN; mask with -1e4"
        yield Finding("error", "large number", function, name, reason)
    if values.size == 1 and 0 < smallest < _SMALLEST_NORMAL:
        reason = f"{smallest:.3g} is below fp16's normal range and may be flushed to 0"
        yield Finding("warning", "small number", function, name, reason)


def _show(tensor: TensorType) -> str:
    return f"{tensor.kind.lower()} {tensor.shape}"
