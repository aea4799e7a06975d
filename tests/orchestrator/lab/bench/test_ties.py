"""A text that rounding changes at a near-tie is a warning of a bench; any other difference is a failure."""

import pytest

from orchestrator.lab.bench import strategies
from orchestrator.lab.bench.contender import BenchRequest, Deviation
from orchestrator.lab.bench.strategies import gaps
from orchestrator.lab.findings import Listener
from orchestrator.lab.forwards import TIE
from tests.support.bench_measurements import bench_plan, measurement
from tests.support.paths import DEMO_TARGET

NAMES = ["mlx-lm", "ar", "adaptive"]
PROMPT = (5, 9, 2, 33)


@pytest.mark.parametrize(
    ("told", "gpu", "status", "text"),
    [
        (
            (0.01, 0.25),
            True,
            "warn",
            "2 of 3 generations part from the reference at near-ties, the widest of which is 0.25 ",
        ),
        ((0.01, 2 * TIE), True, "fail", "1 of 3 generations differ from the reference, and 1 more"),
        ((), False, "fail", "2 of 3 generations differ from the reference"),
    ],
    ids=["near-ties are a warning with their gap", "one real difference", "on a processor every difference is one"],
)
def test_a_bench_whose_adaptive_differs_in_two_of_three_texts(
    told: tuple[float, ...], gpu: bool, status: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    wrong = [measurement("adaptive", 1.0, prompt, tokens=(1, 3)) for prompt in (0, 1)]
    right = [measurement(name, 1.0, prompt) for prompt in range(3) for name in NAMES[:2]]
    requests = [BenchRequest(PROMPT, prompt) for prompt in range(3)]
    measured = [*right, *wrong, measurement("adaptive", 1.0, 2)], NAMES
    monkeypatch.setattr(strategies, "requests_of", lambda *_: requests)
    monkeypatch.setattr(strategies, "run", lambda *_: measured)
    monkeypatch.setattr(strategies, "starts", lambda *_: {})
    monkeypatch.setattr(strategies, "computes_on_gpu", lambda: gpu)
    monkeypatch.setattr(strategies, "gaps", lambda *_: list(told))
    findings = strategies.measure(bench_plan(target=str(DEMO_TARGET), temperature=(0.0,)), [], Listener())

    statuses = {check.name.partition(" at ")[0]: check.status for check in findings.checks}
    assert statuses == {"mlx-lm": "ok", "ar": "ok", "adaptive": status}
    assert findings.good == (status == "warn")
    (complaint,) = (check.text for check in findings.checks if check.status == status)
    assert complaint.startswith(text)


def test_a_process_of_its_own_measures_them():
    deviations = [Deviation(measurement("ar", 1.0, 0, tokens=(1, 3)), measurement("mlx-lm", 1.0, 0, tokens=(1, 2)))]

    (only,) = gaps(DEMO_TARGET, deviations, {(0, 0): PROMPT})

    assert only > 0
