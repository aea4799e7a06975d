"""Laws of what commands say beside their answer: notes on stderr, and a list of workers, complete at any width."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli import pipelines
from orchestrator.cli.pipelines import opened
from protocol.messages.base import Level
from protocol.messages.client import PipelineState
from tests.support.fake_pipeline import READY
from tests.support.paths import DEMO_TARGET


class OpenedPipeline:
    """Its start and its end."""

    def __init__(self, level: Level) -> None:
        self._level: Level = level

    def start(self) -> PipelineState:
        return replace(READY, level=self._level)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("level", "quiet", "words"),
    [
        ("tree", False, ""),
        ("chain", False, "one path of guesses"),
        ("plain", False, "no draft is used"),
        ("plain", True, ""),
    ],
)
def test_only_a_level_below_the_highest_is_told(
    level: Level, quiet: bool, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipelines, "opened", lambda *_, **__: OpenedPipeline(level))
    with pipelines.started(PipelineSettings(), quiet=quiet):
        pass

    output, told = capsys.readouterr()
    assert output == ""
    assert words in told
    assert bool(words) == bool(told.strip())


# A divided target --------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "told"), [("10.0.0.", 1), ("127.0.0.", 0)])
def test_ranks_on_several_machines_are_warned_of_plain_traffic(
    host: str, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "hosts.json"
    file.touch(0o600)
    file.write_text(json.dumps({"hosts": [[f"{host}1:5711"], [f"{host}2:5711"]], "key": "k" * 32}))

    opened(PipelineSettings(target=str(DEMO_TARGET), draft_engine="none", target_hosts=str(file)), quiet=True)

    assert (
        capsys.readouterr().err.count("what MLX sends between the ranks is neither encrypted nor authenticated") == told
    )
