"""Laws of the speculation cache of one draft."""

from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import Distribution
from protocol.messages.worker import Grow

ROOT = NodeId(7)


def grown(token: int, probability: float) -> Grow:
    """A child of the root, sampled from a distribution of two tokens."""
    q = Distribution(ROOT, (token, token + 1), (probability, 1.0 - probability))
    return Grow(SequenceId(1), 0, (ROOT,), (token,), (probability,), 1, 0.01, distributions=(q,))


def test_a_node_that_is_evaluated_twice_keeps_the_distribution_of_its_first_child():
    """Rejection sampling of the first child would be biased by another one."""
    speculation = Speculation(ROOT, 3, 10, Estimates(), wanted=True, now=0.0)
    first, second = grown(5, 0.9), grown(8, 0.4)
    for growth in (first, second):
        speculation.merge(growth, vocabulary=100, now=1.0)
    main = speculation.tree.root.main_child
    assert main is not None

    assert main.token == 5
    assert speculation.distributions([main]) == first.distributions


def test_guesses_that_are_given_up_leave_an_empty_tree_and_a_miss():
    speculation = Speculation(ROOT, 3, 10, Estimates(), wanted=True, now=0.0)
    speculation.merge(grown(5, 0.9), vocabulary=100, now=1.0)
    below = speculation.tree.root.children[5].id
    speculation.merge(Grow(SequenceId(1), 0, (below,), (6,), (0.5,), 1, 0.01), vocabulary=100, now=1.0)
    settlement = speculation.commit([5], round=1, now=2.0)
    speculation.begin_anew(1, now=2.0)
    settlement.apply()

    assert settlement.hit
    assert list(speculation.tree) == [speculation.tree.root]
    assert speculation.lag(since=2.5) == 0.5
