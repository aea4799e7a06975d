"""On a Mac, Core ML computes the executor's results. Elsewhere, its calls accept our arguments."""

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.examine import calls
from draft_worker.coreml.package import MODEL
from draft_worker.coreml.runtime.backends.executor import Executor
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.coreml.runtime.interface import Runtime
from draft_worker.coreml.toolchain import toolchain
from tests.support.models.coreml_runs import convert, tiny

needs_core_ml = pytest.mark.skipif(sys.platform != "darwin", reason="Core ML's predict exists on macOS alone")


class Recording:
    """The executor, and the inputs of its last call."""

    def __init__(self, converted: Converted) -> None:
        self._runtime = ExecutorRuntime(converted)
        self.data: dict[str, np.ndarray] = {}

    def load(self, function: str) -> None:
        self._runtime.load(function)

    def predict(self, function: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.data = {name: value.copy() for name, value in inputs.items()}
        return self._runtime.predict(function, inputs)


def inputs(converted: Converted, width: int) -> dict[str, np.ndarray]:
    """A call of a chain behind a short prompt."""
    recording = Recording(converted)
    calls(converted, cast("Runtime", recording))[width].logits()
    return recording.data


def joined(outputs: Mapping[str, np.ndarray], converted: Converted) -> np.ndarray:
    return np.concatenate([outputs[f"logits_{index}"][0, 0] for index in range(len(converted.package.outputs))], -1)


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

    got = joined(model.predict(data), converted)

    expected = joined(Executor(converted.file).function(function).predict(data), converted)
    assert np.abs(got - expected).max() < 0.1 * expected.astype(np.float32).std()


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("MLModel", {"model", "compute_units", "function_name"}),
        ("CompiledMLModel", {"path", "compute_units", "function_name"}),
        ("MLModel.predict", {"data"}),
        ("CompiledMLModel.predict", {"data"}),
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

    assert joined(outputs, converted).shape == (width, 67)
    assert outputs["kv_new"].shape == (4, 2, width, 8)
    assert all(np.isfinite(value).all() for value in outputs.values())
