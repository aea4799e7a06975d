"""On a Mac, Core ML computes the executor's results. Elsewhere, its calls accept our arguments."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import MODEL
from draft_worker.coreml.runtime.call_inputs import CallInputs, join_logits
from draft_worker.coreml.runtime.executor import Executor
from draft_worker.coreml.toolchain import toolchain
from tests.support.models.coreml_programs import numbers
from tests.support.models.coreml_runs import convert, tiny

needs_core_ml = pytest.mark.skipif(sys.platform != "darwin", reason="Core ML's predict exists on macOS alone")


def inputs(converted: Converted, width: int) -> dict[str, np.ndarray]:
    """A call over 16 slots that hold random keys and values, and a causal chain behind them."""
    kv = np.zeros(converted.package.cache_shape, np.float32)
    kv[:, :, :16] = numbers(kv[:, :, :16].shape)
    seen = np.tril(np.ones((width, 16 + width), bool), 16)
    buffers = CallInputs(converted.package, converted.tables, width)
    return buffers.fill(range(1, width + 1), range(16, 16 + width), seen) | {"kv": kv}


@needs_core_ml
@pytest.mark.parametrize("units", ["CPU_ONLY", "CPU_AND_NE"])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("weights", ["fp16", "int8", "4bit"])
def test_core_ml_computes_what_the_executor_computes(weights: str, width: int, units: str, tmp_path: Path):
    converted = convert(tiny("qwen2"), tmp_path / "model", weights=weights)
    coremltools, function = toolchain().coremltools, converted.package.function(width)
    data = inputs(converted, width)
    model = coremltools.models.MLModel(
        str(converted.folder / MODEL), function_name=function, compute_units=coremltools.ComputeUnit[units]
    )

    got = join_logits(model.predict(data), converted.package, width)

    expected = join_logits(Executor(converted.file).function(function).predict(data), converted.package, width)
    assert np.abs(got - expected).max() < 0.1 * expected.astype(np.float32).std()


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("MLModel", {"model", "compute_units", "function_name"}),
        ("CompiledMLModel", {"path", "compute_units", "function_name"}),
        ("MLModel.predict", {"data", "state"}),
        ("CompiledMLModel.predict", {"data", "state"}),
        ("CompiledMLModel.make_state", set()),
    ],
)
def test_core_ml_s_calls_take_our_arguments(call: str, parameters: set[str]):
    found = toolchain().coremltools.models
    for name in call.split("."):
        found = getattr(found, name)

    assert parameters <= set(inspect.signature(found).parameters)


@pytest.mark.parametrize("width", [1, 16])
def test_the_executor_runs_the_call_of_the_mac_test(width: int, tmp_path: Path):
    converted = convert(tiny("qwen2"), tmp_path / "model", widths=(width,))
    function = Executor(converted.file).function(converted.package.function(width))
    outputs = function.predict(inputs(converted, width))

    assert join_logits(outputs, converted.package, width).shape == (width, 67)
    assert outputs["kv_new"].shape == (4, 2, width, 8)
    assert all(np.isfinite(value).all() for value in outputs.values())
