"""Laws of loading a model as a pipeline: what can't be loaded leaves no process."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.core.model_table import ModelName
from orchestrator.http.access.admission_limit import AdmissionLimit
from orchestrator.http.models.pipelines import ModelPipeline, PipelineLoader
from orchestrator.http.monitoring.metrics import Metrics
from orchestrator.http.responses.routes import ResponseStore
from orchestrator.http.settings import ServerSettings
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from tests.support.fake_pipeline import READY


class SlowPipeline:
    """Takes its time to start, like a real one."""

    address = "ipc:///nowhere"

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._closed = threading.Event()

    def start(self) -> PipelineState:
        self._closed.wait(0.1)
        self.steps.append("started")
        return READY

    def wait(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self.steps.append("closed")
        self._closed.set()


def test_a_model_without_a_tokenizer_is_closed_after_it_has_started(tmp_path: Path):
    pipeline = SlowPipeline()
    model = ModelPipeline(("m",), tmp_path, lambda _: cast(Any, pipeline))
    loader = PipelineLoader([model], ServerSettings(names=()), Metrics(AdmissionLimit(1)), ResponseStore())

    with pytest.raises(PipelineError):
        asyncio.run(loader.load(ModelName("m"), lambda _: None))

    assert pipeline.steps == ["started", "closed"]
