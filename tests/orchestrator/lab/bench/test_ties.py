"""A text that rounding changes at a near-tie is a warning of a bench; any other difference is a failure."""

import mlx.core as mx
import numpy as np
import pytest

from orchestrator.lab.bench import strategies
from orchestrator.lab.bench.measurement import BenchRequest, Deviation
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.tie_examination import gap
from orchestrator.lab.bench.ties import TIE, Parting, gaps, parting
from orchestrator.lab.findings import Findings, Listener
from protocol.inference.slots import PREFIX
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise, scores
from tests.support.bench_measurements import measurement
from tests.support.models.tiny_models import VOCABULARY, tree_model
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
    plan = {"target": str(DEMO_TARGET), "draft": None, "repeats": 1, "max_tokens": 8, "controls": False}
    return strategies.measure(
        BenchPlan.of(draft_tokens="0", strategies="ar,adaptive", temperature=(0.0,), **plan), [], Listener()
    )


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


@pytest.mark.parametrize(
    ("one", "other", "shared", "following"),
    [((1, 2, 3), (1, 4, 3), (1,), (2, 4)), ((1, 2), (1, 2, 3), (1, 2), (3,)), ((), (7,), (), (7,))],
)
def test_texts_part_at_their_first_difference(one: tuple, other: tuple, shared: tuple, following: tuple):
    assert parting(PROMPT, one, other, 0.7, 3) == Parting((*PROMPT, *shared), following, 0.7, 3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3)])
def test_the_gap_is_that_between_what_follows_and_the_best(sampling: Sampling):
    model, noise = tree_model(), Noise(VOCABULARY)
    sequence = model.sequence()
    sequence.prefill(PROMPT[:-1])
    logits = sequence.evaluate(PROMPT[-1:], [PREFIX])
    place = np.array(scores(logits, [len(PROMPT)], sampling, noise))[0]
    first, second, *_, last = np.argsort(-place).tolist()
    scale = (sampling.temperature or 1.0) / np.array(logits.astype(mx.float32)).std()

    def measured(*following: int) -> float:
        return gap(model, Parting(PROMPT, following, sampling.temperature, sampling.seed), noise)

    assert measured(first, second) == pytest.approx((place[first] - place[second]) * scale, rel=1e-3)
    assert measured(last, first) == pytest.approx((place[first] - place[last]) * scale, rel=1e-3)
    # One text ends: at best by the second token.
    assert measured(first) == measured(first, second)
    assert measured(last) == measured(last, first)


def test_a_process_of_its_own_measures_them():
    deviations = [Deviation(measurement("ar", 1.0, 0, tokens=(1, 3)), measurement("mlx-lm", 1.0, 0, tokens=(1, 2)))]

    (only,) = gaps(DEMO_TARGET, deviations, {(0, 0): PROMPT})

    assert only > 0
