"""Fan-out, controller and running estimates: the formulas of the strategies."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.estimates import HitModel
from orchestrator.core.policy.strategies import geometric_fan_out
from orchestrator.runtime.restarts import RestartPolicy
from protocol.speculation.token_tree import Calibration


@given(acceptance=st.floats(0, 1), exponent=st.floats(0.05, 5), depth=st.integers(1, 12), budget=st.integers(0, 200))
def test_fan_out_spends_exactly_its_budget(acceptance, exponent, depth, budget):
    fan = geometric_fan_out(acceptance, exponent, depth, budget)

    assert len(fan) == depth + 1
    assert sum(fan) == budget
    assert min(fan) >= 0


def test_fan_out_follows_the_published_formula():
    a, r, depth = 0.8, 1.0, 3
    shares = [a ** (k / (1 + r)) for k in range(depth)] + [a ** (depth / (1 + r)) * (1 - a) ** (-1 / (1 + r))]
    fan = geometric_fan_out(a, r, depth, 1000)

    assert fan == pytest.approx([1000 * share / sum(shares) for share in shares], abs=1)


def test_fan_out_is_no_worse_than_any_other_split_under_its_hit_model():
    """Exhaustive over all splits of a small budget, for the model's own expected hits."""
    a, r, depth, budget = 0.6, 0.7, 2, 12
    weights = [(1 - a) * a**k for k in range(depth)] + [a**depth]

    def hits(fan):
        return sum(weight * (1 - guesses**-r) for weight, guesses in zip(weights, fan, strict=True) if guesses)

    splits = [(x, y, budget - x - y) for x in range(budget + 1) for y in range(budget + 1 - x)]
    best = max(map(hits, splits))

    assert hits(geometric_fan_out(a, r, depth, budget)) >= best - 0.02


def test_calibration_believes_what_it_measured_and_tells_first_guesses_from_second_ones():
    calibration, ranked, modest = Calibration(), Calibration(), Calibration()
    random.seed(2)
    for _ in range(2000):
        modest.observe(0.4, 0, random.random() < 0.7)
        calibration.observe(0.95, 0, random.random() < 0.6)
        ranked.observe(0.5, 0, True)
        ranked.observe(0.45, 1, False)

    assert calibration(0.95, 0) == pytest.approx(0.6, abs=0.08)
    assert calibration(0.1, 0) == pytest.approx(0.1 * 0.6 / 0.95, abs=0.01), (
        "it overrates itself: so here, until measured"
    )
    assert 0.8 < modest(0.8, 0) < modest(0.97, 0) < 0.99, "it underrates itself: no claim is certain for that"
    assert ranked(0.5, 0) > 0.9
    assert ranked(0.45, 1) < 0.1
    assert ranked(0.45, 3) == ranked(0.45, 7) == pytest.approx(0.45)


@pytest.mark.parametrize("exponent", [0.3, 0.8, 1.5])
def test_the_hit_exponent_is_recovered(exponent):
    model = HitModel()
    random.seed(3)
    for _ in range(3000):
        fan = random.choice([2, 3, 5, 8])
        model.observe(fan, random.random() < 1 - fan**-exponent)

    assert model.exponent == pytest.approx(exponent, rel=0.35)


def test_a_worker_that_dies_three_times_a_minute_is_not_started_again_and_rare_deaths_are_forgiven():
    often, rarely = RestartPolicy(), RestartPolicy()

    assert [often.died(at) for at in (0.0, 1.0, 2.0)] == [0.0, 0.5, None]
    assert [rarely.died(at) for at in (0.0, 61.0, 122.0, 183.0)] == [0.0] * 4


def test_deaths_over_a_request_that_was_rejected_do_not_count():
    policy = RestartPolicy()

    assert [policy.died(at) for at in (0.0, 1.0)] == [0.0, 0.5]
    assert not policy.pardon()
    assert [policy.died(at) for at in (2.0, 3.0, 4.0)] == [0.0, 0.5, None]
    assert policy.pardon()
    assert policy.died(5.0) == 0.0
