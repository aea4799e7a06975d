"""Laws of `profile --overhead`: what the pipelines have to say about their draft is told, and told once."""

from types import SimpleNamespace

import pytest

from orchestrator.tools.profile import overhead
from orchestrator.tools.profile.measure import ProfileTask


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

    found = overhead.tracing_cost(ProfileTask("x", (0.0,), 8, 0, {}), 2, lambda _: None, notes.append)

    assert notes == [Silent.note]
    assert found.ratio == 1.0
