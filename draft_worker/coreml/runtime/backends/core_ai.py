"""Core AI, the successor of Core ML on macOS 27, behind the interface `Runtime`.

On macOS 27 the system runs the program and prefers the Neural Engine. Elsewhere the runtime inside the package
coreai-core interprets it on the processor, so everything here but `_neural_engine` also runs on Linux.
"""

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.backends.core_ai_graph import authoring, program
from draft_worker.coreml.runtime.interface import DeviceState
from protocol.contracts.coreml.neural_engine import package_fingerprint
from protocol.errors import InputError
from protocol.paths import cache_folder


class CoreAiRuntime:
    """A converted folder as a Core AI model, written on first use. Its cache must be an input and an output."""

    name = "coreai"

    def __init__(self, converted: Converted) -> None:
        """Raises InputError where Core AI is not installed, and for a package that it can't run."""
        asset = authoring().AIModelAsset.load(written(converted))
        self._library: Any = import_module("coreai.runtime")
        options = _neural_engine(self._library)
        self.device = f"Core AI, {'processor only' if options is None else 'Neural Engine preferred'}"
        self._loop = asyncio.new_event_loop()
        opened = AsyncExitStack()
        weakref.finalize(self, _close, self._loop, opened)
        try:
            model = self._loop.run_until_complete(opened.enter_async_context(asset.executable(options)))
            self._functions: dict[str, Any] = {name: model.load_function(name) for name in converted.package.functions}
        except (RuntimeError, KeyError, OSError) as error:
            raise InputError(f"Core AI can't load {converted.folder} ({error}): use --draft-engine mlx.") from error

    def load(self, function: str) -> None:
        """Every function is loaded with the model."""

    def predict(self, function: str, inputs: Mapping[str, Array], state: DeviceState | None = None) -> dict[str, Array]:
        # An NDArray copies its data, so the call holds no buffer of the caller.
        given = {name: self._library.NDArray(np.ascontiguousarray(value, np.float16)) for name, value in inputs.items()}
        outputs = self._loop.run_until_complete(self._functions[function](given))
        return {name: value.numpy() for name, value in outputs.items()}

    def make_state(self) -> DeviceState:
        raise InputError("Core AI's public operations can't express a state: convert the model again with --kv io.")


def written(converted: Converted) -> Path:
    """The path of the folder's program as a Core AI asset. The first use writes it; it is complete or absent."""
    path = cache_folder() / "compiled" / f"{package_fingerprint(converted.folder)}.aimodel"
    if not authoring().AIModelAsset.is_valid(path):
        translated = program(converted.file, list(converted.package.functions))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            translated.save_asset(Path(temporary) / path.name)
            shutil.rmtree(path, ignore_errors=True)
            shutil.move(Path(temporary) / path.name, path)
    return path


def _neural_engine(library: Any) -> Any:
    """Options that prefer the Neural Engine; None where Core AI has no devices to choose from."""
    if not library.SpecializationOptions.is_supported():
        return None
    return library.SpecializationOptions.from_preferred_compute_unit_kind(library.ComputeUnitKind.neural_engine())


def _close(loop: asyncio.AbstractEventLoop, opened: AsyncExitStack) -> None:
    loop.run_until_complete(opened.aclose())
    loop.close()
