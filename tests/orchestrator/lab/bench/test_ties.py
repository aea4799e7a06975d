"""A text that rounding changes at a near-tie is a warning of a bench; any other difference is a failure."""

import pytest

from orchestrator.lab.bench import strategies
from orchestrator.lab.bench.contender import BenchRequest, Deviation
from orchestrator.lab.bench.strategies import gaps
from orchestrator.lab.findings import Findings, Listener
from orchestrator.lab.forwards import TIE
from tests.support.bench_measurements import bench_plan, measurement
from tests.support.paths import DEMO_TARGET

NAMES = ["mlx-lm", "ar", "adaptive"]
PROMPT = (5, 9, 2, 33)


def found(monkeypatch: pytest.MonkeyPatch, *told: float, gpu: bool = True) -> Findings:
    """Of a bench whose `adaptive` differs in two of three texts, at these gaps."""
    wrong = [measurement("adaptive", 1.0, prompt, tokens=(1, 3)) for prompt in (0, 1)]
    right = [measurement(name, 1.0, prompt) for prompt in range(3) for name in NAMES[:2]]
    requests = [BenchRequest(PROMPT, prompt) for prompt in range(3)]
    measured = [*right, *wrong, measurement("adaptive", 1.0, 2)], NAMES
    monkeypatch.setattr(strategies, "requests_of", lambda *_: requests)
    monkeypatch.setattr(strategies, "run", lambda *_: measured)
    monkeypatch.setattr(strategies, "computes_on_gpu", lambda: gpu)
    monkeypatch.setattr(strategies, "gaps", lambda *_: list(told))
    return strategies.measure(bench_plan(target=str(DEMO_TARGET), temperature=(0.0,)), [], Listener())


def statuses(findings: Findings) -> dict[str, str]:
    return {check.name.partition(" at ")[0]: check.status for check in findings.checks}


def test_texts_that_part_at_near_ties_are_a_warning_with_their_gap(monkeypatch: pytest.MonkeyPatch):
    findings = found(monkeypatch, 0.01, 0.25)

    assert statuses(findings) == {"mlx-lm": "ok", "ar": "ok", "adaptive": "warn"}
    assert findings.good
    (warning,) = (check.text for check in findings.checks if check.status == "warn")
    assert "2 of 3 generations part from the reference at near-ties" in warning
    assert "0.25 standard deviations" in warning


def test_one_real_difference_among_them_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    findings = found(monkeypatch, 0.01, 2 * TIE)

    assert statuses(findings)["adaptive"] == "fail"
    assert not findings.good
    (failure,) = (check.text for check in findings.checks if check.status == "fail")
    assert failure.startswith("1 of 3 generations differ from the reference, and 1 more")


def test_on_a_processor_every_difference_is_one(monkeypatch: pytest.MonkeyPatch):
    assert statuses(found(monkeypatch, gpu=False))["adaptive"] == "fail"


def test_a_process_of_its_own_measures_them():
    deviations = [Deviation(measurement("ar", 1.0, 0, tokens=(1, 3)), measurement("mlx-lm", 1.0, 0, tokens=(1, 2)))]

    (only,) = gaps(DEMO_TARGET, deviations, {(0, 0): PROMPT})

    assert only > 0
