"""`generate` and `chat` ask a pipeline that keeps running instead of loading its models again."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import Client, Pipeline, SamplingParams
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.running_pipelines import held, keeps_running, minutes_to_keep, running_pipeline
from orchestrator.runtime.session import Session, end_kept
from protocol.errors import PipelineError
from protocol.security.private_files import is_private
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import inject, members, shoot, until

SEEN = """
from orchestrator.runtime import loop

def restore(self, *told, real=loop.Session.restore, **named):
    offered = real(self, *told, **named)
    if offered is not None:
        open({seen!r}, "w").close()
    return offered

loop.Session.restore, loop._PING_SECONDS = restore, 0.2
"""
"""The orchestrator tells that it has seen that it is offered, and looks more often."""
MODELS = PipelineSettings(target=str(DEMO_TARGET), draft=str(DEMO_DRAFT))


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all sessions, with no other test's. A busy machine may answer late."""
    monkeypatch.setattr("orchestrator.runtime.session.sessions_folder", lambda: tmp_path / "s")
    monkeypatch.setattr("orchestrator.cli.running_pipelines._ANSWER_SECONDS", 20.0)
    return tmp_path / "s"


@pytest.mark.usefixtures("sessions")
def test_one_that_lasts_is_found():
    with Pipeline(settings=MODELS) as pipeline:
        assert running_pipeline(MODELS) is None

        keeps_running(pipeline, MODELS.changed(kv_bits=8))
        assert running_pipeline(MODELS) is None

        keeps_running(pipeline, MODELS)
        found = running_pipeline(MODELS)
        assert found is not None
        assert found.address == pipeline.address
        assert running_pipeline(MODELS.changed(draft=None)) is not None
        assert running_pipeline(MODELS.changed(target=str(DEMO_DRAFT))) is None
        assert running_pipeline(MODELS.changed(strategy="sd")) is None
    assert running_pipeline(MODELS) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left", [False, True], ids=["", "left"])
@pytest.mark.parametrize("lost", ["lasting", ""], ids=["file", "folder"])
def test_one_whose_files_went_is_found_again(
    sessions: Path, lost: str, left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = tmp_path / "seen"
    inject(monkeypatch, tmp_path, "orchestrator", SEEN.format(seen=str(seen)))
    with Pipeline(settings=MODELS) as pipeline:
        keeps_running(pipeline, MODELS)
        until(seen.exists)
        if left:
            pipeline.leave(60.0)
        (folder,) = sessions.glob("lp-*")
        # At once, since the pipeline makes again what it misses.
        (folder / lost).rename(tmp_path / "gone")

        found = until(lambda: running_pipeline(MODELS))
        worker = shoot(pipeline, "draft_worker")
        until(lambda: members(str(folder)).get("draft_worker", worker) != worker)
        until(lambda: not found.state().down)
        assert is_private(folder.stat())
        assert [each.folder for each in end_kept()] == [folder] * left
    assert not list(sessions.glob("lp-*"))


def test_one_whose_place_others_can_enter_by_now_ends_with_a_sentence(sessions: Path):
    told: list[str] = []
    with Pipeline(settings=MODELS, on_notice=lambda notice: told.append(notice.text)) as pipeline:
        shutil.rmtree(sessions)
        sessions.mkdir()
        sessions.chmod(0o755)

        with pytest.raises(PipelineError, match="ended unexpectedly"):
            pipeline.wait()
    (words,) = told
    assert re.fullmatch(r"The pipeline's folder was removed, so it ends\. .* must be yours alone: .*", words)


def left(seconds: float) -> Client:
    """One that a command leaves, as the next one finds it."""
    with Pipeline(settings=MODELS) as pipeline:
        pipeline.leave(seconds)
    found = running_pipeline(MODELS)
    assert found is not None
    assert found.generate("def f(", SamplingParams(max_tokens=2)).text
    return found


def test_one_that_is_left_ends_when_nobody_has_asked_it_for_a_while(sessions: Path):
    with held(left(2.0), every=0.2):
        time.sleep(2.5)
        assert running_pipeline(MODELS) is not None

    until(lambda: not list(sessions.glob("lp-*")))
    assert running_pipeline(MODELS) is None


@pytest.mark.parametrize("begin", [end_kept, lambda: Session.create().remove()])
def test_one_that_is_left_ends_when_another_begins(sessions: Path, begin: Callable[[], object]):
    left(60.0)
    begin()

    until(lambda: not list(sessions.glob("lp-*")))
    assert running_pipeline(MODELS) is None


def test_a_terminal_keeps_small_models_and_scripts_keep_what_they_say(monkeypatch: pytest.MonkeyPatch):
    pipeline = Pipeline(settings=MODELS)
    weights = pipeline.memory().weights
    assert 0 < weights < pipeline.memory().bytes

    def kept(asked: float | None, *, terminal: bool, memory: int, settings: PipelineSettings = MODELS) -> float:
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
        monkeypatch.setattr("orchestrator.cli.running_pipelines.memory_bytes", lambda: memory)
        return minutes_to_keep(asked, pipeline, settings)

    assert kept(None, terminal=True, memory=4 * weights) == 5.0
    assert kept(None, terminal=True, memory=3 * weights) == 0
    assert kept(None, terminal=False, memory=4 * weights) == 0
    assert kept(2.0, terminal=False, memory=1) == 2.0
    assert kept(0.0, terminal=True, memory=4 * weights) == 0
    assert kept(2.0, terminal=True, memory=4 * weights, settings=MODELS.changed(strategy="sd")) == 0
