"""How long the target waits for a draft: whatever the draft sends and claims, for a moment only."""

import itertools

import pytest

from orchestrator.core.options import Options
from orchestrator.core.policy.decision import SequenceView, VerifyNodes
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.worker import Grow
from tests.support.sequence_views import sequence_view

ROOT, POSITION, VOCABULARY = NodeId(1), 5, 100
LONGEST_PAUSE = 0.25


def growth(token: int, seconds: float) -> Grow:
    """One node, which no chain continues."""
    return Grow(SequenceId(1), 0, (ROOT,), (token,), (0.9,), 1, seconds)


def view(speculation: Speculation, now: float) -> SequenceView:
    fields = {"now": now, "grown_at": speculation.grown_at, "drafting": speculation.drafting}
    return sequence_view(speculation.tree, speculation.estimates, **fields)


def pause(strategy: str, claimed: float, every: float, known: float = 0.02) -> float:
    """Seconds that a strategy waits while a draft sends growth every so often that never completes a chain."""
    estimates = Estimates()
    estimates.target.observe(1, known)
    speculation = Speculation(ROOT, 3, POSITION, estimates, True, 0.0)
    speculation.start(0, 0.0)
    decide = STRATEGIES[strategy](Options(strategy=strategy, fallback="neural")).decide
    for step in itertools.count():
        now = step * every
        if isinstance(decide(view(speculation, now)), VerifyNodes):
            return now
        speculation.merge(growth(step % VOCABULARY, claimed), VOCABULARY, now)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
@pytest.mark.parametrize("claimed", [0.0, 0.001, 1.0, 1e6], ids=str)
def test_a_flood_that_completes_no_chain_delays_the_target_for_a_moment(strategy: str, claimed: float):
    assert pause(strategy, claimed, every=0.001) <= LONGEST_PAUSE


def test_a_slow_draft_is_waited_for_as_long_as_its_chain_takes():
    assert 0.4 < pause("sd", claimed=0.1, every=0.1) < 1.5


@pytest.mark.parametrize("claimed", [0.05, 1.0, 1e6], ids=str)
def test_no_step_took_longer_than_the_time_since_the_growth_before(claimed: float):
    speculation = Speculation(ROOT, 3, POSITION, Estimates(), True, 10.0)
    speculation.start(0, 10.0)
    speculation.merge(growth(1, claimed), VOCABULARY, 10.2)
    speculation.merge(growth(2, claimed), VOCABULARY, 10.3)

    assert speculation.estimates.step.get(0.0) <= 0.15 + 1e-9
