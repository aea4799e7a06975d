"""Core ML behind the interface `Runtime`. Its calls need a Mac."""

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import MODEL, Array
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.coreml import Units, package_fingerprint
from protocol.paths import cache_folder


class CoreMlRuntime:
    """A package compiled for this machine. The first load of a function may take minutes; later loads are fast.

    Every function is loaded before the first call. A function that is loaded in the middle of a request would stop the
    worker for as long as the Neural Engine's compiler needs, because coremltools loads with the GIL held.
    """

    name = "coreml"

    def __init__(
        self, converted: Converted, units: Units = "CPU_AND_NE", functions: Sequence[str] | None = None
    ) -> None:
        """`functions`: those that are loaded now; None for all."""
        # The Neural Engine is a preference: Core ML moves unsupported operations to the CPU without a message.
        self._units: Units = units
        self._path = str(compiled(converted.folder))
        self.device = f"Core ML, {'Neural Engine preferred' if units == 'CPU_AND_NE' else 'processor only'}"
        self._models: dict[str, Any] = {}
        for function in converted.package.functions if functions is None else functions:
            self.load(function)

    def load(self, function: str) -> None:
        if function not in self._models:
            coremltools = toolchain().coremltools
            self._models[function] = coremltools.models.CompiledMLModel(
                path=self._path,
                compute_units=coremltools.ComputeUnit[self._units],
                function_name=function,
            )

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        lend(inputs.values())
        return self._models[function].predict(data=inputs)


def compiled(folder: Path) -> Path:
    """The path of a converted folder's compiled model. The first use compiles it.

    The path is fixed, because the system caches its preparation for the Neural Engine by this path.
    """
    path = cache_folder() / "compiled" / f"{package_fingerprint(folder)}.mlmodelc"
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            unfinished = toolchain().coremltools.models.utils.compile_model(
                model=str(folder / MODEL), destination_path=str(Path(temporary) / path.name)
            )
            shutil.move(unfinished, path)
    return path


_SPARE = 1 << 14
"""References to each array. Lost changes of the count never use them all up; they take 128 KiB an array."""
_LENT: dict[int, list[Array]] = {}
"""By id; a kept array's id belongs to no other object."""


def lend(arrays: Iterable[Array]) -> None:
    """Keep these arrays for the life of the process. The caller must reuse its arrays, or memory grows.

    Core ML keeps the inputs of a call after the call has returned, and releases them about a second later on a queue of
    its own. coremltools then drops its reference to the NumPy array without the GIL (pull requests 2827 and 2829 of
    apple/coremltools, open in 2026-11). If that reference is the last one, the array is freed on that queue, and the
    heap is damaged. If it is not, the count can still be changed by both threads at once, and one of the changes be
    lost.
    """
    for array in arrays:
        if id(array) not in _LENT:
            _LENT[id(array)] = [array] * _SPARE
