"""Selects the runtime of a converted model; the executor as a runtime. Core ML is in `apple`.

A new runtime is a class like `ExecutorRuntime` and a case of `open_runtime`.
"""

import sys
from collections.abc import Mapping

import mlx.core as mx

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.backends.executor import Executor, Precision
from draft_worker.coreml.runtime.interface import Runtime
from protocol.contracts.coreml.examination import RuntimeName


def open_runtime(converted: Converted, name: RuntimeName | None = None) -> Runtime:
    """The runtime of that name; by default Core ML on a Mac, the executor elsewhere."""
    match name or default_runtime():
        case "coreml":
            from draft_worker.coreml.runtime.backends.apple import CoreMlRuntime

            return CoreMlRuntime(converted)
        case "executor":
            return ExecutorRuntime(converted)


def default_runtime() -> RuntimeName:
    return "coreml" if sys.platform == "darwin" else "executor"


class ExecutorRuntime:
    """The executor runs the same package on any machine, to check its graph."""

    name = "executor"

    def __init__(self, converted: Converted, precision: Precision = "fp16") -> None:
        kind = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
        self.device = f"{kind}, by the executor: no Neural Engine"
        self._executor = Executor(converted.file, precision)

    def load(self, function: str) -> None:
        self._executor.function(function)

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._executor.function(function).predict(inputs)
