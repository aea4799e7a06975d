"""Simulated hours with faults keep every invariant, and a machine that breaks an invariant is detected."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from orchestrator.core.drafts.pool import DraftPool
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import WaitUntil
from orchestrator.core.request import Request
from orchestrator.core.scheduler import ResponseTimeouts
from tests.support.simulated_hours.simulation import simulate_hours


def outcomes(seeds, hours=0.17):
    """The outcomes of these seeds, in this process."""
    return [simulate_hours(seed, hours) for seed in seeds]


def test_short_simulations_keep_every_promise():
    found = outcomes(range(2000, 2040))
    counts = sum((one.counts for one in found), Counter())

    assert [(one.seed, one.violation) for one in found if one.violation] == []
    # The simulations must contain each kind of fault.
    for what in ("finished", "cancelled", "target killed", "draft killed", "attached", "silent"):
        assert counts[what] > 0, what


@pytest.mark.thorough
def test_the_same_seed_is_the_same_simulation():
    first, second = outcomes([7, 7])

    assert first.counts == second.counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_hours_keep_every_promise():
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        broken = [found for found in pool.map(simulate_hours, range(1000), chunksize=2) if found.violation]

    assert broken == []


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Request, "is_answered_by", lambda self, verdict: True),
        (DraftPool, "request_ended", lambda self, sequence: []),
        (ResponseTimeouts, "_awaiting", lambda self: []),
        (Adaptive, "decide", lambda self, requests, now: [WaitUntil(now + 1e4)] * len(requests)),
        (DraftPool, "draft_down", lambda self, incarnation, now: []),
    ],
    ids=[
        *("an unchecked verdict", "a request that is held after its end", "a message that is never repeated"),
        *("an endless wait", "a message to a dead draft"),
    ],
)
def test_a_machine_with_a_fault_is_detected(owner, name, replacement, monkeypatch):
    monkeypatch.setattr(owner, name, replacement)
    violations = [one.violation for one in outcomes(range(12)) if one.violation]

    assert violations
    if owner is ResponseTimeouts:
        assert any("no tick is due" in violation or "still live" in violation for violation in violations)
