"""The runtimes of a package with states: Core ML on a Mac, the executor elsewhere. Knows no sequence."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.runtime.backends.executor import Executor, Precision
from draft_worker.coreml.runtime.backends.lent_arrays import lend
from draft_worker.coreml.stateful.package import StatefulPackage
from draft_worker.coreml.toolchain import toolchain
from protocol.errors import InputError

_SPARE = 64
"""There is a view for every length of the mask."""


class StatefulRuntime(Protocol):
    """A loaded package. Its shapes vary, so a call states no width."""

    device: str

    def make_state(self) -> Any:
        """The states of a new sequence, zeros."""
        ...

    def predict(self, inputs: Mapping[str, Array], state: Any) -> Mapping[str, Array]:
        """One call, which changes `state`. The runtime may read `inputs` until it ends: the caller keeps them."""
        ...


def open_stateful(package: StatefulPackage) -> StatefulRuntime:
    return CoreMlStates(package) if sys.platform == "darwin" else ExecutorStates(package)


class CoreMlStates:
    """Core ML compiles the package at each load."""

    device = "Core ML, Neural Engine preferred"

    def __init__(self, package: StatefulPackage) -> None:
        """Raises InputError if Core ML can't load the package."""
        coremltools = toolchain().coremltools
        units = coremltools.ComputeUnit.CPU_AND_NE
        try:
            # coremltools only warns if Core ML fails to load a model.
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                self._model: Any = coremltools.models.MLModel(str(package.path), compute_units=units)
        except (RuntimeWarning, RuntimeError, ValueError, OSError) as error:
            raise InputError(f"Core ML can't load {package.path} ({error}): draft with another model.") from error

    def make_state(self) -> Any:
        return self._model.make_state()

    def predict(self, inputs: Mapping[str, Array], state: Any) -> Mapping[str, Array]:
        lend(inputs.values(), spare=_SPARE)
        return self._model.predict(data=inputs, state=state)


class ExecutorStates:
    """The executor, as far as its operations go."""

    device = "by the executor: no Neural Engine"

    def __init__(self, package: StatefulPackage, precision: Precision = "fp16") -> None:
        self._function = Executor(package.file, precision).function(package.layout.function)

    def make_state(self) -> Any:
        return self._function.make_state()

    def predict(self, inputs: Mapping[str, Array], state: Any) -> Mapping[str, Array]:
        return self._function.predict(inputs, state)
