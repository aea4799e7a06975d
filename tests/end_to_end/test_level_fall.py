"""A target whose forward fails at its level goes on at a lower one, and dead workers are reported. Real processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.runtime.notices import Notice
from protocol.errors import PipelineError
from tests.conftest import Reference
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import mark, members, remains, until

PROMPT = "def quicksort(items):"
PARAMS = SamplingParams(temperature=0.7, seed=12, max_tokens=60)
PROGRAM = """
import sys

if "target_worker" in sys.orig_argv:
    from protocol.inference.tree_sequence import TreeSequence

    evaluate = TreeSequence.evaluate

    def failing(self, tokens, *others):
        if self.level in {levels} and self.committed > 20:
            raise ValueError("Shapes (3,4) and (4,4) cannot be broadcast.")
        return evaluate(self, tokens, *others)

    TreeSequence.evaluate = failing
"""


@pytest.fixture
def notices() -> list[Notice]:
    return []


@pytest.fixture
def pipeline(
    request: pytest.FixtureRequest, notices: list[Notice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pipeline]:
    """Of a target whose forwards fail at these levels."""
    (tmp_path / "sitecustomize.py").write_text(PROGRAM.format(levels=request.param))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    pipeline = Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT), draft_engine="mlx", on_notice=notices.append)
    with pipeline:
        name = mark(pipeline)
        yield pipeline
    until(lambda: not remains(name), seconds=2.0)


@pytest.mark.parametrize(
    ("pipeline", "level"),
    [pytest.param(("tree",), "chain", marks=pytest.mark.thorough), (("tree", "chain"), "plain")],
    indirect=["pipeline"],
)
def test_requests_go_on_exactly_at_the_next_lower_level(
    pipeline: Pipeline, level: str, notices: list[Notice], reference: Reference
):
    process = members(mark(pipeline))["target_worker"]

    assert pipeline.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
    assert pipeline.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
    assert pipeline.state().level == level
    assert members(mark(pipeline))["target_worker"] == process
    told = [notice for notice in notices if notice.kind == "warning"]
    assert "cannot be broadcast), so it verifies less from now on (level chain)" in told[0].text
    assert f"(level {level})" in told[-1].text


@pytest.mark.parametrize("pipeline", [()], indirect=True)
def test_a_death_and_the_restart_behind_it_are_reported(
    pipeline: Pipeline, notices: list[Notice], reference: Reference
):
    pid = until(lambda: members(mark(pipeline)).get("target_worker"))
    os.kill(pid, signal.SIGKILL)

    assert pipeline.generate(PROMPT, PARAMS).tokens == reference(PROMPT, PARAMS).tokens
    died, again = [notice.text for notice in notices if notice.kind == "warning"][:2]
    assert died.startswith("The target worker ended by signal 9.")
    assert died.endswith("Starting it again.")
    assert again == "The target worker runs again."


@pytest.mark.parametrize("pipeline", [("tree", "chain", "plain")], indirect=True)
def test_a_target_that_fails_at_every_level_says_why(pipeline: Pipeline, notices: list[Notice]):
    with pytest.raises(PipelineError, match="Two targets ended while they computed this request"):
        pipeline.generate(PROMPT, PARAMS)

    assert any("failed (ValueError: Shapes" in notice.text for notice in notices)
