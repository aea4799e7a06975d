"""Which nodes `adaptive` asks the draft to grow: those that the target may come to verify, given what a token costs."""

import pytest

from orchestrator.core.options import Options
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import VerifyNodes, WaitUntil
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow
from tests.support.sequence_views import sequence_view

ROOT, VOCABULARY = NodeId(1), 100


def estimates(token_cost: float, acceptance: float = 0.5) -> Estimates:
    """One token costs `token_cost` of a forward of one token."""
    found = Estimates()
    for _ in range(40):
        for width in (1, 5, 9, 17):
            found.target.observe(width, 0.1 * (1 + token_cost * (width - 1)))
        found.acceptance.observe(acceptance)
    return found


def least(found: Estimates) -> float:
    plan = Adaptive(Options()).plan(found, 1, None)
    assert isinstance(plan, BestFirst)
    return plan.least


def test_the_more_a_token_costs_the_more_probable_a_node_must_be():
    """Without measurements the draft grows whatever it can; even the dearest token leaves a limit."""
    timeless = Estimates()
    for width in (1, 5, 9, 17):
        timeless.target.observe(width, 0.0)
    limits = [least(estimates(cost)) for cost in (0.005, 0.02, 0.06)]

    assert least(Estimates()) == 0.0
    assert least(estimates(0.0)) == pytest.approx(0.0, abs=1e-6)
    assert 0.0 <= least(timeless) < 0.01
    assert 0.0 < limits[0] < limits[1] < limits[2] < 0.1
    assert all(0.0 < least(estimates(1.0, acceptance)) <= 0.1 for acceptance in (0.0, 1.0))
    assert least(estimates(0.02, 0.3)) < least(estimates(0.02, 0.8))


@pytest.mark.parametrize(("claimed", "decision"), [(0.9, WaitUntil), (0.001, VerifyNodes)])
def test_growth_of_a_draft_that_pauses_is_not_waited_for(claimed: float, decision: type):
    """A node with the path probability 0.9 will be grown; none is, if the best open node has 0.001."""
    found = estimates(0.01, 0.95)
    speculation = Speculation(ROOT, 3, 5, found, True, 0.0)
    speculation.start(0, 0.0)
    speculation.merge(Grow(SequenceId(1), 0, (ROOT,), (7,), (claimed,), 1, 0.001), VOCABULARY, 0.01)
    view = sequence_view(speculation.tree, found, now=0.0101, ready_since=0.01, grown_at=0.01, drafting=True)

    assert isinstance(Adaptive(Options()).decide(view), decision)
