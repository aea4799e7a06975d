"""Laws of `profile --overhead`: both pipelines draft alike, and what they say about their draft is told once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api.settings import PipelineSettings
from orchestrator.lab.profile import measure as overhead
from orchestrator.lab.profile.measure import ProfileTask
from protocol.contracts.coreml.conversion import FOLDER_MODEL


class Silent:
    """A pipeline with a note, which generates at a constant speed."""

    note = "There is no draft: add one."

    def __init__(self, **_: object) -> None: ...

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(statistics=SimpleNamespace(tokens_per_second=10.0))


def test_the_note_of_the_pipelines_is_told_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overhead, "Pipeline", Silent)
    notes: list[str] = []

    found = overhead.tracing_cost(ProfileTask("x", (0.0,), 8, 0, PipelineSettings()), 2, lambda _: None, notes.append)

    assert notes == [Silent.note]
    assert found.ratio == 1.0


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, "mlx"),
        ({"draft_engine": "auto"}, "mlx"),
        ({"draft": "converted"}, "coreml"),
        ({"draft_engine": "ngram"}, "ngram"),
    ],
)
def test_only_the_trace_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], engine: str):
    (tmp_path / "converted" / FOLDER_MODEL).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given: list[dict[str, Any]] = []

    class Told(Silent):
        def __init__(self, **options: Any) -> None:
            given.append(options)

    monkeypatch.setattr(overhead, "Pipeline", Told)

    settings = PipelineSettings().changed(**options)

    overhead.tracing_cost(ProfileTask("x", (0.0,), 8, 0, settings), 1, lambda _: None)

    assert [bool(each.pop("trace")) for each in given] == [False, True]
    assert given == [{"settings": settings.changed(draft_engine=engine)}] * 2
