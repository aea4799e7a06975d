"""Laws of stages that measure Core ML beside MLX: what Core ML can't do is a note, and MLX is measured all the same."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.lab.bench.plan import BenchModels
from orchestrator.lab.calibration import OverlapTimes
from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light import devices, pipelines
from orchestrator.lab.first_light.pipelines import plan
from orchestrator.lab.first_light.stages import Asked, LightSettings, stage_names
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile
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
        return OverlapTimes(0.02, 0.007, 0.02, 0.007)

    monkeypatch.setattr(devices, "both_at_once", both_at_once)
    monkeypatch.setattr(devices, "converted_draft", lambda *_: Path("package"))
    for name in ("has_neural_engine", "computes_on_gpu"):
        monkeypatch.setattr(devices, name, lambda: True)
    return measured


def titles(found: Findings) -> list[str]:
    return [table.title for table in found.tables]


def test_the_overlap_with_core_ml_is_told_first_and_measured_last(engines: list[str]):
    found = devices.overlap(ASKED)

    assert engines == ["mlx", "coreml"]
    assert titles(found) == ["Target on the GPU, draft in Core ML", "Both on the GPU"]


@pytest.mark.parametrize("error", [InputError("Sliding windows can't be converted."), PipelineError(REASON)])
def test_an_overlap_without_core_ml_is_a_note(monkeypatch: pytest.MonkeyPatch, engines: list[str], error: Exception):
    def refused(*_: object) -> Path:
        raise error

    monkeypatch.setattr(devices, "converted_draft", refused)
    found = devices.overlap(ASKED)

    assert engines == ["mlx"]
    assert titles(found) == ["Both on the GPU"]
    assert any(str(error) in note for note in found.notes)


def test_what_is_measured_before_core_ml_is_kept_if_its_load_does_not_end(
    monkeypatch: pytest.MonkeyPatch, engines: list[str]
):
    so_far: list[Findings] = []

    def ended(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "converted_draft", ended)
    with pytest.raises(KeyboardInterrupt):
        devices.overlap(ASKED._replace(so_far=so_far.append))

    assert titles(so_far[-1]) == ["Both on the GPU"]


# Profile -------------------------------------------------------------------------------------------


def test_a_profile_has_the_draft_in_mlx_where_core_ml_fails(monkeypatch: pytest.MonkeyPatch):
    def calibrate(target: None, draft: None, engine: str, **_: object) -> DeviceProfile:
        if engine == "coreml":
            raise PipelineError(REASON)
        return load_profile("m3-pro-qwen3-4b")

    monkeypatch.setattr(devices, "has_neural_engine", lambda: True)
    monkeypatch.setattr(devices, "calibrate", calibrate)
    found = devices.profile(ASKED)

    assert REASON in found.notes[0]
    assert "engine is mlx" in found.notes[1]
    assert [attached.name for attached in found.attachments] == [devices.FILE]


# Prefill -------------------------------------------------------------------------------------------


class FakePipeline:
    """Answers at once, unless Core ML would prefill."""

    def __init__(self, *_: object, prefill_engine: str, **__: object) -> None:
        if prefill_engine == "coreml":
            raise InputError("Sliding windows can't be converted.")

    def __enter__(self) -> "FakePipeline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def state(self) -> SimpleNamespace:
        return SimpleNamespace(context=512, vocabulary=50)

    def generate(self, *_: object) -> None: ...


def test_prompts_are_measured_without_core_ml_where_it_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipelines, "has_neural_engine", lambda: True)
    monkeypatch.setattr(pipelines, "Pipeline", FakePipeline)
    found = pipelines.prefill(ASKED)

    assert found.tables[0].columns == ("prompt tokens", "the target itself, ms", "MLX process, ms")
    assert found.notes == ("Core ML: not measured. Sliding windows can't be converted.",)


# Bench ---------------------------------------------------------------------------------------------

PLACE = ExaminedSystem("macOS 25A1", "Apple M9", "f" * 64)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineVerdict]:
    """What was found by examinations of the demo draft, which is converted; the last one counts."""
    verdicts: list[EngineVerdict] = []
    (tmp_path / FOLDER_MODEL).mkdir()
    monkeypatch.setattr(pipelines, "conversion_of", lambda _: tmp_path)
    monkeypatch.setattr(pipelines, "place_of", lambda _: PLACE)
    monkeypatch.setattr(pipelines, "recorded", lambda _: verdicts[-1] if verdicts else None)
    return verdicts


def core_ml_line() -> tuple[bool, str]:
    ours, note = pipelines.with_core_ml_draft(plan(), BenchModels(DEMO_TARGET, DEMO_DRAFT))
    return ours.core_ml_draft, note


def test_a_draft_is_a_line_of_the_bench_if_it_passed_its_examination(known: list[EngineVerdict], tmp_path: Path):
    unexamined = core_ml_line()
    known.append(EngineVerdict(place=PLACE, choice="mlx", reason="its logits are wrong"))
    failed = core_ml_line()
    known.append(EngineVerdict(place=PLACE, choice="coreml", reason="all is well"))
    passed = core_ml_line()
    (tmp_path / FOLDER_MODEL).rmdir()

    assert not unexamined[0]
    assert "has not examined" in unexamined[1]
    assert failed == (False, "A draft in Core ML: not here. Its examination decided for MLX (its logits are wrong).")
    assert passed == (True, "")
    assert core_ml_line() == unexamined
