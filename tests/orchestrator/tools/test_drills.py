"""The promises about faults, with small counts; `bin/test -m slow` runs the full counts.

Only the full runs check time limits: a busy machine may break them.
"""

import os
from typing import get_args

import pytest

from orchestrator.tools.drill.outcome import DrillName, DrillOutcome
from orchestrator.tools.drill.registry import DRILLS

FEW: dict[DrillName, int] = {
    "draft-kill": 1,
    "draft-stop": 1,
    "target-kill": 1,
    "orchestrator-kill": 1,
    "interrupt": 1,
    "segments": 4,
}
"""tests/end_to_end/test_chaos.py covers garbage. A short soak shows nothing."""


def test_every_name_has_a_drill():
    assert get_args(DrillName) == tuple(DRILLS)


@pytest.mark.parametrize("name", FEW)
def test_tokens_are_right_and_nothing_is_left_behind(name: DrillName):
    outcome = DRILLS[name].run(FEW[name], 7, lambda: None)

    assert list(outcome.failures) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DRILLS)
def test_the_promise_is_kept_to_the_full(name: DrillName):
    outcome = DRILLS[name].run(DRILLS[name].full, 7, lambda: None)

    assert outcome.held, broken(outcome)


def broken(outcome: DrillOutcome) -> str:
    """What broke the promise, and the load of the machine."""
    sentences = [*outcome.failures, *outcome.late][:20]
    return "\n".join([outcome.measured, f"load {os.getloadavg()[0]:.1f}", *sentences])
