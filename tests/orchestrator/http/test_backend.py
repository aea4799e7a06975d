"""Laws of a server before another program's pipeline: a pause of the pipeline is not its end, a failure is."""

from typing import Any, cast

import msgspec
import pytest

from orchestrator.api.client import NoPipeline
from orchestrator.http.backend import PipelineThread, RunningPipeline
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from tests.support.fake_pipeline import READY


class LoadingClient:
    address = "ipc:///nowhere"

    def state(self, _: float) -> PipelineState:
        return msgspec.structs.replace(READY, ready=False)


def test_a_pipeline_that_is_left_while_it_loads_is_not_called_ready():
    told: list[Any] = []
    pipeline = RunningPipeline(cast(Any, LoadingClient()))
    thread = PipelineThread(pipeline, told.append, lambda: told.append("end"))

    pipeline.close()
    thread.start()
    thread.join()

    assert (told, thread.failure) == (["end"], None)


class FullDisk:
    address = "ipc:///nowhere"

    def start(self) -> PipelineState:
        raise OSError(28, "No space left on device")


def test_a_pipeline_that_fails_in_a_way_nobody_foresaw_has_failed():
    thread = PipelineThread(cast(Any, FullDisk()), lambda _: None, lambda: None)

    thread.run()

    assert "No space left on device" in str(thread.failure)


class PausedClient:
    """Of a pipeline that answers after five seconds, and then says that it has failed."""

    address = "ipc:///nowhere"

    def state(self, wait: float = 3.0) -> PipelineState:
        if wait < 5.0:
            raise NoPipeline(self.address)
        return msgspec.structs.replace(READY, failure="The target is gone.")


def test_a_pipeline_that_answers_late_is_not_gone_and_may_say_why_it_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.http.backend._CHECK_SECONDS", 0.0)

    for waiting in ("start", "wait"):
        with pytest.raises(PipelineError, match="The target is gone"):
            getattr(RunningPipeline(cast(Any, PausedClient())), waiting)()
