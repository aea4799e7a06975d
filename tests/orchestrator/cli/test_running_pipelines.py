"""`generate` asks a pipeline that keeps running instead of loading its models again."""

from pathlib import Path

import pytest

from orchestrator import Pipeline
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.running_pipelines import keeps_running, running_pipeline
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

MODELS = PipelineSettings(target=str(DEMO_TARGET), draft=str(DEMO_DRAFT))


def test_a_lasting_pipeline_is_found_by_its_models_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.runtime.session.sessions_home", lambda: tmp_path / "s")
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
