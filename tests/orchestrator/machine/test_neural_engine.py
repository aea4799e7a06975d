"""Laws of examining the Neural Engine: whatever its device does is a finding, and the pipeline heeds the verdict."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import msgspec
import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.examine import answers, calls, carry_out, compare, placements
from draft_worker.coreml.package import Array
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from draft_worker.coreml.toolchain import toolchain
from orchestrator.machine import neural_engine as engine
from orchestrator.machine.check import Check
from orchestrator.machine.checkpoints import demo_model
from orchestrator.machine.drafts import draft_choice as choosing
from orchestrator.machine.drafts import preparation
from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.draft_choice import DraftChoice, draft_choice, place_of, weigh
from orchestrator.machine.drafts.preparation import Declined
from orchestrator.machine.neural_engine import LIMITS, Limits, StageOutcome, judge
from orchestrator.runtime.model_checks import examined
from protocol.contracts.coreml import (
    Agreed,
    EngineVerdict,
    ExaminationOrder,
    ExaminedSystem,
    Loading,
    Placed,
    Predicted,
    Stage,
    Timed,
    Units,
    Written,
    record,
    recorded,
)
from tests.support.models.coreml_programs import converted_demo

pytestmark = pytest.mark.usefixtures("home")
FAKE = (sys.executable, "-m", "tests.support.fake_examiner")
PLACE = ExaminedSystem("macOS 25A1", "Apple M9", "f" * 64)

GOLDEN = StageOutcome("golden", "CPU_AND_NE", (Written(),), "done")


def failures(findings: list[Check]) -> list[str]:
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.status == "fail"]


def chosen(verdict: EngineVerdict | None) -> str | None:
    return None if verdict is None else verdict.choice


def run_threads(monkeypatch: pytest.MonkeyPatch, threads: float) -> None:
    """So many threads of this machine want to run."""
    monkeypatch.setattr(os, "getloadavg", lambda: (threads, threads, threads))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    run_threads(monkeypatch, 0.5)


# Processes -----------------------------------------------------------------------------------------


def examination(behaviour: str, monkeypatch: pytest.MonkeyPatch, limits: Limits = LIMITS) -> list[Check]:
    monkeypatch.setenv("FAKE_DEVICE", behaviour)
    return examined(str(converted_demo()), examiner=FAKE, limits=limits)


def test_an_honest_device_is_used(monkeypatch: pytest.MonkeyPatch):
    findings = examination("honest", monkeypatch)

    assert failures(findings) == []
    assert findings[-1].name == "verdict"
    assert chosen(recorded(place_of(converted_demo()))) == "coreml"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("behaviour", "limits", "words", "choice"),
    [
        ("crashing", LIMITS, "ended by signal 11", "unknown"),
        ("raising", LIMITS, "the compiler has had enough", "mlx"),
        ("hanging", Limits(silence=1.0), "said nothing for 1 s", "unknown"),
        ("killed", LIMITS, "ended by signal 9", "unknown"),
        ("full", LIMITS, "No space left on device", "unknown"),
        ("compiling", Limits(loading=0.3), "was ended after 0 min of compiling width 8 for the Neural", "unknown"),
        # No draft runs there.
        ("crashing on the processor", LIMITS, "", "coreml"),
    ],
)
def test_a_process_that_fails_is_a_finding_and_decides_if_it_will_again(
    behaviour: str, limits: Limits, words: str, choice: str, monkeypatch: pytest.MonkeyPatch
):
    """Beside other programs none decides against Core ML."""
    for threads, expected in ((1000.0, "unknown" if choice == "mlx" else choice), (0.5, choice)):
        run_threads(monkeypatch, threads)
        findings = examination(behaviour, monkeypatch, limits)
        verdict = recorded(place_of(converted_demo()))

        assert words in "".join(failures(findings)[:1])
        assert verdict is not None
        assert verdict.choice == expected
        assert words in verdict.reason
        assert findings[-1].text.startswith("not known") is (expected == "unknown")


@pytest.mark.parametrize("death", ["crashing", "killed"])
def test_a_package_whose_examinations_die_is_given_up_on_a_quiet_machine_and_never_for_ever(
    death: str, monkeypatch: pytest.MonkeyPatch
):
    for name, fact in {"installed_version": "9", "converted_draft": converted_demo(), "loaded_bytes": 0}.items():
        monkeypatch.setattr(preparation, name, lambda *_, fact=fact: fact)
    auto, place = AutoDraft(checkpoint="draft", target="", place=PLACE, examiner=FAKE), place_of(converted_demo())

    def started(behaviour: str, threads: float = 0.5) -> tuple[str | None, bool]:
        """What is recorded after a start of the pipeline, and whether it is to be tried again."""
        monkeypatch.setenv("FAKE_DEVICE", behaviour)
        run_threads(monkeypatch, threads)
        report = preparation.prepare(auto, 0, lambda _: None)
        return chosen(recorded(place)), isinstance(report, Declined) and "a quiet machine tries it" in report.reason

    assert [started(death, 1000), started("honest", 1000)] == [("unknown", True)] * 2
    assert [started(death), started(death), started("honest")] == [("unknown", True), ("mlx", False), ("mlx", False)]
    examination("honest", monkeypatch)
    assert started(death) == ("coreml", False)


def test_silence_during_a_load_is_no_hang_and_the_load_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has lasted ten minutes, by the clock, when it is told for the second time, and ends then."""
    monkeypatch.setenv("FAKE_DEVICE", "compiling")
    monkeypatch.setenv("FAKE_LOADED", str(tmp_path / "loaded"))
    ahead, told = [0.0], list[str]()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))

    def on_stage(stage: str) -> None:
        told.extend([stage] * ("so far" in stage))
        ahead[0] = 600.0 * len(told)
        if len(told) == 2:
            (tmp_path / "loaded").touch()

    findings = examined(str(converted_demo()), examiner=FAKE, limits=Limits(progress=0.1), on_stage=on_stage)

    assert failures(findings) == []
    assert told[:2] == [f"compiling width 8 for the Neural Engine, {minutes} min so far" for minutes in (0, 10)]


def test_a_plan_that_can_not_be_had_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    findings = examination("unplanned", monkeypatch)

    assert failures(findings) == []
    assert [finding.status for finding in findings if finding.name == "compute plan"] == ["warn"]


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a Neural Engine")
def test_where_there_is_none_the_command_says_so_and_ends_well():
    command = [sys.executable, "-m", "orchestrator.cli.app", "doctor", "--neural-engine", "--json"]
    (finding,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    assert finding["status"] == "ok"
    assert "which is no Neural Engine" in finding["text"]


@pytest.mark.skipif(sys.platform != "darwin", reason="Core ML's predict exists on macOS alone")
def test_the_examination_of_this_mac_comes_to_a_verdict():
    findings = examined(str(converted_demo()), predicts=30)

    assert recorded(place_of(converted_demo())) is not None
    assert "verdict" in [finding.name for finding in findings]


# Devices -------------------------------------------------------------------------------------------


class Device(ExecutorRuntime):
    """The executor in Core ML's place, with a fault: its numbers are wrong, or it computes something else."""

    def __init__(self, converted: Converted, fault: str, units: Units = "CPU_AND_NE") -> None:
        super().__init__(converted.file)
        self._fault = "" if units == "CPU_ONLY" else fault
        self._calls = 0

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self._calls += 1
        changed = dict(inputs)
        match self._fault:
            case "rope":
                changed["sin"] = -inputs["sin"]
            case "mask":
                changed["mask"] = np.roll(inputs["mask"], 1, axis=-1)
            case "head":
                # Of the last layer: the values that it kept are lost.
                changed["kv"] = inputs["kv"].copy()
                changed["kv"][-1, 0] = 0.0
        outputs = super().predict(function, changed)
        factor = {"lying": -1.0, "nan": float("nan"), "drifting": 1 + self._calls / 100}.get(self._fault, 1.0)
        with np.errstate(invalid="ignore"):
            return {name: value * factor for name, value in outputs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lying", "logits deviate by"),
        ("nan", "some are no numbers"),
        ("drifting", "different logits for the same input"),
    ],
)
def test_a_device_that_misbehaves_is_found_out(fault: str, words: str, tmp_path: Path):
    stages: list[tuple[Stage, Units]] = [("golden", "CPU_AND_NE"), ("predict", "CPU_AND_NE"), ("predict", "CPU_ONLY")]
    found = []
    for stage, units in stages:
        order = ExaminationOrder(
            folder=str(converted_demo()), stage=stage, golden=str(tmp_path / "golden.npz"), units=units, predicts=6
        )
        reports = carry_out(order, lambda converted, units: Device(converted, fault, units))
        found.append(StageOutcome(stage, units, tuple(reports), "done"))
    findings, verdict = judge(found, PLACE)

    assert any(words in failure for failure in failures(findings))
    assert chosen(verdict) == "mlx"


def judged(reports: list[Agreed]) -> str | None:
    outcome = StageOutcome("predict", "CPU_AND_NE", (*reports, Predicted(300, True)), "done")
    return chosen(judge([GOLDEN, outcome], PLACE)[1])


@pytest.fixture(scope="module")
def golden() -> dict[int, np.ndarray]:
    converted = Converted.open(converted_demo())
    return answers(calls(converted, ExecutorRuntime(converted.file)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("noise", [0.01, 0.02, 0.05, 0.1])
def test_a_sound_package_passes_though_its_logits_are_noisy(noise: float, golden: dict[int, np.ndarray]):
    source = np.random.default_rng(7)

    def noisy(logits: np.ndarray) -> np.ndarray:
        return logits + noise * logits.std(-1, keepdims=True) * source.standard_normal(logits.shape)

    trials = ({width: noisy(rows) for width, rows in golden.items()} for _ in range(80))

    assert [judged(list(compare(trial, golden))) for trial in trials].count("coreml") >= 79


@pytest.mark.parametrize("fault", ["head", "rope", "mask"])
def test_a_package_that_computes_something_else_is_refused(fault: str, golden: dict[int, np.ndarray]):
    converted = Converted.open(converted_demo())

    assert judged(list(compare(answers(calls(converted, Device(converted, fault))), golden))) == "mlx"


# Judging -------------------------------------------------------------------------------------------


def predicted(units: Units, milliseconds: float, *, deviation: float | None = 0.01, same: int = 20) -> StageOutcome:
    reports = (
        Agreed(1, 0.01, 0, 0),
        Agreed(8, deviation, 20, same),
        Predicted(300, True),
        Timed(8, milliseconds),
        Timed(1, 1.0),
    )
    return StageOutcome("predict", units, reports, "done")


HUNG = StageOutcome("predict", "CPU_ONLY", (), "hung", "said nothing for 300 s", lasting=False)
PROCESSOR = predicted("CPU_ONLY", 30.0)


@pytest.mark.parametrize(
    ("engine", "processor", "choice", "latency"),
    [
        # A device that is no faster than the processor is a warning, and the trial decides.
        (predicted("CPU_AND_NE", 7.0), PROCESSOR, "coreml", "ok"),
        (predicted("CPU_AND_NE", 29.0), PROCESSOR, "coreml", "ok"),
        (predicted("CPU_AND_NE", 40.0), PROCESSOR, "coreml", "warn"),
        # Logits have to be the executor's.
        (predicted("CPU_AND_NE", 7.0, deviation=0.05, same=19), PROCESSOR, "coreml", "ok"),
        (predicted("CPU_AND_NE", 7.0, deviation=0.2), PROCESSOR, "mlx", "ok"),
        (predicted("CPU_AND_NE", 7.0, deviation=0.05, same=16), PROCESSOR, "mlx", "ok"),
        (predicted("CPU_AND_NE", 7.0, deviation=None), PROCESSOR, "mlx", "ok"),
        # No draft runs on the processor.
        (predicted("CPU_AND_NE", 7.0, same=2), HUNG, "mlx", None),
        (predicted("CPU_AND_NE", 7.0), HUNG, "coreml", None),
        (predicted("CPU_AND_NE", 7.0), predicted("CPU_ONLY", 30.0, deviation=0.2, same=2), "coreml", "ok"),
        (predicted("CPU_AND_NE", 7.0), predicted("CPU_ONLY", 30.0, deviation=None), "coreml", "ok"),
    ],
)
def test_a_verdict(engine: StageOutcome, processor: StageOutcome, choice: str, latency: str | None):
    findings, verdict = judge([GOLDEN, engine, processor], PLACE)

    assert chosen(verdict) == choice
    assert [finding.status for finding in findings if finding.name == "latency"][-1:] == ([latency] if latency else [])


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        (Placed("width_8", 100, 60, 0.5, {"gather": 40}), "40 gather"),
        (Placed("width_8", 0, 0, 0.0, {}), ""),
        (Placed("width_8", 90, 0, 0.0, {"conv": 90}), "90 conv"),
    ],
)
def test_a_plan_warns_and_never_decides(placed: Placed, words: str):
    """Core ML may tell of the default function only, and a plan is an estimate: the times decide."""
    plan = StageOutcome("plan", "CPU_AND_NE", (placed,), "done")
    findings, verdict = judge([GOLDEN, predicted("CPU_AND_NE", 7), predicted("CPU_ONLY", 30), plan], PLACE)
    (warning,) = [finding for finding in findings if finding.name == "compute plan"]

    assert chosen(verdict) == "coreml"
    assert warning.status == "warn"
    assert words in warning.text


# The verdict ---------------------------------------------------------------------------------------


def test_a_verdict_is_found_again_at_its_own_place_alone():
    verdict = EngineVerdict(place=PLACE, choice="mlx", reason="it hangs")
    record(verdict)

    assert recorded(PLACE) == verdict
    for changes in ({"system": "macOS 25A2"}, {"chip": "Apple M8"}, {"package": "0" * 64}):
        assert recorded(msgspec.structs.replace(PLACE, **changes)) is None


@pytest.mark.parametrize("draft", [demo_model("draft"), converted_demo])
def test_the_pipeline_falls_back_to_the_same_model_in_mlx_and_says_so(draft: Any):
    """The model, or the converted folder alone, is known."""
    verdict, folder = EngineVerdict(place=PLACE, choice="mlx", reason="latency: no faster"), converted_demo()
    choice = weigh("coreml", folder, str(draft() if callable(draft) else draft), verdict)

    assert (choice.engine, choice.folder) == ("mlx", demo_model("draft"))
    assert choice.note.startswith("The draft runs in MLX, not on the Neural Engine (latency: no faster)")
    assert "\n" not in choice.note
    for sound in (None, EngineVerdict(place=PLACE, choice="coreml", reason="fine")):
        assert weigh("coreml", folder, str(folder), sound) == DraftChoice("coreml", folder)


def test_a_mac_reads_the_verdict_and_others_have_nothing_to_read(monkeypatch: pytest.MonkeyPatch):
    folder = str(converted_demo())
    monkeypatch.setattr(choosing, "place_of", lambda _: PLACE)
    monkeypatch.setattr(sys, "platform", "darwin")
    record(EngineVerdict(place=PLACE, choice="mlx", reason="it hangs"))
    assert draft_choice("coreml", folder).engine == "mlx"
    monkeypatch.setattr(sys, "platform", "linux")

    assert draft_choice("coreml", folder).engine == "coreml"


# Core ML's compute plan ----------------------------------------------------------------------------


def test_the_compute_plan_is_asked_as_the_library_wants(monkeypatch: pytest.MonkeyPatch):
    """Fakes with the real names, signatures and fields of the installed library."""
    kinds, devices = (import_module(f"coremltools.models.{name}") for name in ("compute_plan", "compute_device"))
    engine, processor = (
        create_autospec(kind, instance=True)
        for kind in (devices.MLNeuralEngineComputeDevice, devices.MLCPUComputeDevice)
    )
    names = ("const", "conv", "gather")
    operations = [kinds.MLModelStructureProgramOperation({}, name, [], [], None) for name in names]
    block = kinds.MLModelStructureProgramBlock([], operations, [])
    function = kinds.MLModelStructureProgramFunction([], block)
    plan: Mock = create_autospec(kinds.MLComputePlan, instance=True)
    plan.model_structure.program.functions = {"width_8": function}
    usages = [None, *(kinds.MLComputePlanDeviceUsage(device, []) for device in (engine, processor))]
    plan.get_compute_device_usage_for_mlprogram_operation.side_effect = usages
    costs = [kinds.MLComputePlanCost(weight) for weight in (0.75, 0.25)]
    plan.get_estimated_cost_for_mlprogram_operation.side_effect = costs
    load: Mock = create_autospec(kinds.MLComputePlan.load_from_path, return_value=plan)
    monkeypatch.setattr(kinds.MLComputePlan, "load_from_path", load)
    monkeypatch.setattr("draft_worker.coreml.examine.compiled", lambda folder: folder / "compiled.mlmodelc")

    assert list(placements(Path("model"))) == [Loading(None), Placed("width_8", 2, 1, 0.75, {"gather": 1})]
    assert load.call_args.kwargs == {
        "path": "model/compiled.mlmodelc",
        "compute_units": toolchain().coremltools.ComputeUnit.CPU_AND_NE,
    }
