"""The promises about faults, with counts that fit a test suite; `bin/test -m slow tests/faults` takes those promised.

Time limits are held by the long runs alone: a machine that does other work breaks them by itself.
"""

import os

import pytest

from orchestrator.tools.drill.outcome import DrillOutcome
from orchestrator.tools.drill.registry import DRILLS

FEW = {"draft-kill": 1, "draft-stop": 1, "target-kill": 1, "orchestrator-kill": 1, "interrupt": 1, "segments": 4}
"""Garbage: see tests/end_to_end/test_chaos.py. A soak of a few faults tells nothing."""


@pytest.mark.parametrize("name", FEW)
def test_nothing_is_wrong_or_left_behind(name: str):
    outcome = DRILLS[name].run(FEW[name], 7, lambda: None)

    assert list(outcome.failures) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DRILLS)
def test_the_promise_is_kept_to_the_full(name: str):
    outcome = DRILLS[name].run(DRILLS[name].full, 7, lambda: None)

    assert outcome.held, told(outcome)


def told(outcome: DrillOutcome) -> str:
    """What broke it, and under what load."""
    sentences = [*outcome.failures, *outcome.late][:20]
    return "\n".join([outcome.measured, f"load {os.getloadavg()[0]:.1f}", *sentences])
