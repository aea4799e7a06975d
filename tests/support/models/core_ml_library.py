"""coremltools with its real signatures, whose predictions are the executor's."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.coreml.toolchain import toolchain


class Library:
    """coremltools' classes with their real signatures; predictions are the executor's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, converted: Converted) -> None:
        models = toolchain().coremltools.models
        self.executor = ExecutorRuntime(converted.file)
        self.made: list[dict[str, Any]] = []
        self.compiling: Mock = create_autospec(models.utils.compile_model, side_effect=self._compile)
        model: Mock = create_autospec(models.CompiledMLModel, side_effect=self._load)
        self._kind = models.CompiledMLModel
        monkeypatch.setattr(models.utils, "compile_model", self.compiling)
        monkeypatch.setattr(models, "CompiledMLModel", model)

    def _compile(self, model: str, destination_path: str) -> str:
        assert Path(model).is_dir()
        Path(destination_path).mkdir()
        return destination_path

    def _load(self, **given: Any) -> Any:
        self.made.append(given)
        loaded = create_autospec(self._kind, instance=True)
        loaded.predict.side_effect = lambda data, state=None: self._predict(given["function_name"], data)
        return loaded

    def _predict(self, function: str, data: Any) -> Any:
        # The library's own requirements on inputs.
        toolchain().coremltools.models.MLModel._check_predict_data(data)
        return self.executor.predict(function, data)
