"""Laws of stages that measure Core ML beside MLX: what Core ML can't do is a note, and MLX is measured all the same."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.calibration import OverlapTimes
from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light import devices, pipelines
from orchestrator.lab.first_light.pipelines import plan
from orchestrator.lab.first_light.stages import Asked, LightSettings, stage_names
from orchestrator.machine.profiles.device_profiles import load_profile
from protocol.contracts.coreml import FOLDER_MODEL, EngineVerdict, ExaminedSystem
from protocol.errors import InputError, PipelineError
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

ASKED = Asked(LightSettings(short=True), lambda _: None)
REASON = "The draft worker ended while it was measured."


def test_the_examination_is_the_first_stage_that_loads_core_ml():
    """It tells why a load fails, and what it compiles is kept for the others."""
    names = stage_names()

    assert all(
        names.index("neural-engine") < names.index(other) for other in ("overlap", "profile", "prefill", "bench")
    )


# Overlap -------------------------------------------------------------------------------------------


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines whose overlap was measured; on a Mac whose Core ML works."""
    measured: list[str] = []

    def both_at_once(target: Path, draft: Path, engine: str, **_: object) -> OverlapTimes:
        measured.append(engine)
        return OverlapTimes(0.02, 0.007, 0.02, 0.007, 0.009)

    monkeypatch.setattr(devices, "both_at_once", both_at_once)
    monkeypatch.setattr(devices, "converted_draft", lambda *_: Path("package"))
    for name in ("has_neural_engine", "computes_on_gpu"):
        monkeypatch.setattr(devices, name, lambda: True)
    return measured


def refusing(error: BaseException):
    def refuse(*_: object) -> Path:
        raise error

    return refuse


def titles(found: Findings) -> list[str]:
    return [table.title for table in found.tables]


def test_the_overlap_with_core_ml_is_told_first_and_measured_last(engines: list[str]):
    found = devices.overlap(ASKED)

    assert engines == ["mlx", "coreml"]
    assert titles(found) == ["Target on the GPU, draft in Core ML", "Both on the GPU"]


@pytest.mark.parametrize(
    "error", [InputError("Sliding windows can't be converted."), PipelineError(REASON), KeyboardInterrupt()], ids=repr
)
def test_an_overlap_without_core_ml_is_a_note_and_what_was_measured_before_is_kept(
    monkeypatch: pytest.MonkeyPatch, engines: list[str], error: BaseException
):
    found: list[Findings] = []
    monkeypatch.setattr(devices, "converted_draft", refusing(error))
    with suppress(KeyboardInterrupt):
        found.append(devices.overlap(ASKED._replace(so_far=found.append)))

    assert engines == ["mlx"]
    assert titles(found[-1]) == ["Both on the GPU"]
    assert any(str(error) in note for note in found[-1].notes)


# Profile -------------------------------------------------------------------------------------------


def test_a_profile_has_the_draft_in_mlx_where_core_ml_fails(monkeypatch: pytest.MonkeyPatch):
    mlx = load_profile("m3-pro-qwen3-4b")
    monkeypatch.setattr(devices, "has_neural_engine", lambda: True)
    monkeypatch.setattr(
        devices, "calibrate", lambda *models, **_: mlx if models[2] == "mlx" else refusing(PipelineError(REASON))()
    )
    found = devices.profile(ASKED)

    assert REASON in found.notes[0]
    assert "engine is mlx" in found.notes[1]
    assert [attached.name for attached in found.attachments] == [devices.FILE]


# Bench ---------------------------------------------------------------------------------------------

PLACE = ExaminedSystem("macOS 25A1", "Apple M9", "f" * 64)


@pytest.mark.parametrize(
    ("converted", "choice", "line", "note"),
    [
        (True, None, False, "has no verdict on it."),
        (True, "unknown", False, "has no verdict on it."),
        (True, "mlx", False, "Its examination decided for MLX (the reason)."),
        (True, "coreml", True, ""),
        (False, "coreml", False, "has no verdict on it."),
    ],
)
def test_a_draft_is_a_line_of_the_bench_if_it_passed_its_examination(
    converted: bool, choice: Any, line: bool, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    verdict = choice and EngineVerdict(place=PLACE, choice=choice, reason="the reason")
    if converted:
        (tmp_path / FOLDER_MODEL).mkdir()
    monkeypatch.setattr(pipelines, "conversion_of", lambda _: tmp_path)
    monkeypatch.setattr(pipelines, "place_of", lambda _: PLACE)
    monkeypatch.setattr(pipelines, "recorded", lambda _: verdict)
    ours, told = pipelines.with_core_ml_draft(plan(), BenchModels(DEMO_TARGET, DEMO_DRAFT))

    assert (ours.core_ml_draft, told.endswith(note), bool(told)) == (line, True, bool(note))
