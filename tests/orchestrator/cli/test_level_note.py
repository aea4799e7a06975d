"""A command that opens a pipeline says on stderr what its target verifies, if that is less than trees."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli import pipelines
from protocol.messages.base import Level
from protocol.messages.client import PipelineState
from tests.support.fake_pipeline import READY


class OpenedPipeline:
    """Its context and its state."""

    def __init__(self, level: Level) -> None:
        self._level: Level = level

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def state(self) -> PipelineState:
        return replace(READY, level=self._level)


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
