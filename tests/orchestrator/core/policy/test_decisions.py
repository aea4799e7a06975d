"""Laws of single decisions: how long the target waits, which nodes the draft grows, and how long chains are."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.estimates import Estimates
from orchestrator.core.options import Options
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import VerifyNodes, WaitUntil
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst, Chain, FanOut
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import node_id
from tests.support.request_views import guesses_behind, seen_request

ROOT, POSITION, VOCABULARY = NodeId(1), 5, 100
LONGEST_PAUSE = 0.25


def growth(token: int, seconds: float) -> Grow:
    """One node, which no chain continues."""
    return Grow(RequestId(1), 0, (ROOT,), (token,), (0.9,), 1, seconds)


def view(speculation: Speculation) -> Any:
    fields = {"grown_at": speculation.grown_at, "drafting": speculation.drafting}
    return seen_request(speculation.tree, speculation.estimates, **fields)


def merge(speculation: Speculation, growth: Grow, now: float) -> None:
    step = speculation.merge(growth, VOCABULARY, now)
    assert step is not None
    speculation.estimates.observe_growth(step)


def pause(strategy: str, claimed: float, every: float, known: float = 0.02) -> float:
    """Seconds that a strategy waits while a draft sends growth every so often that never completes a chain."""
    estimates = Estimates()
    estimates.target.observe(1, known)
    speculation = Speculation(ROOT, 3, POSITION, estimates, True, 0.0)
    speculation.start(0, 0.0)
    decide = STRATEGIES[strategy](Options(strategy=strategy, fallback="neural")).decide
    for step in itertools.count():
        now = step * every
        if isinstance(decide([view(speculation)], now)[0], VerifyNodes):
            return now
        merge(speculation, growth(step % VOCABULARY, claimed), now)
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
    merge(speculation, growth(1, claimed), 10.2)
    merge(speculation, growth(2, claimed), 10.3)

    assert speculation.estimates.step.get(0.0) <= 0.15 + 1e-9


# Which nodes the draft is asked to grow ----------------------------------------------------------


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
    merge(speculation, Grow(RequestId(1), 0, (ROOT,), (7,), (claimed,), 1, 0.001), 0.01)
    view = seen_request(speculation.tree, found, ready_since=0.01, grown_at=0.01, drafting=True)

    assert isinstance(Adaptive(Options()).decide([view], 0.0101)[0], decision)


# The length of chains, and prompt lookup ---------------------------------------------------------


CHAIN = (7, 8, 9, 10)


def with_chain(draft_tokens: int | None = None) -> Any:
    """A request whose draft has grown four nodes, one below the other."""
    estimates = Estimates()
    estimates.target.observe(1, 0.02)
    speculation = Speculation(ROOT, 3, 5, estimates, True, 0.0)
    speculation.start(0, 0.0)
    parent = ROOT
    for token in CHAIN:
        merge(speculation, Grow(RequestId(1), 0, (parent,), (token,), (0.9,), 1, 0.001), 0.0)
        parent = node_id(parent, token)
    return _view(speculation, draft_tokens)


def without_draft(guesses: list[tuple[int, float]]) -> Any:
    """A request with guesses by prompt lookup alone."""
    estimates = Estimates()
    estimates.target.observe(1, 0.02)
    estimates.target.observe(8, 0.021)
    view = _view(Speculation(ROOT, 3, 5, estimates, True, 0.0), None)
    view.guesses_behind = lambda leaf: guesses_behind(leaf, guesses)
    return view


def _view(speculation: Speculation, draft_tokens: int | None) -> Any:
    fields = {"drafting": speculation.drafting, "task": SimpleNamespace(draft_tokens=draft_tokens)}
    return seen_request(speculation.tree, speculation.estimates, **fields)


@pytest.mark.parametrize("strategy", ["sd", "ssd"])
@pytest.mark.parametrize(("own", "length"), [(None, 3), (1, 1), (2, 2), (4, 4)])
def test_a_request_with_a_k_of_its_own_gets_chains_of_that_length(strategy: str, own: int | None, length: int):
    decision = STRATEGIES[strategy](Options(strategy=strategy, draft_tokens=3)).decide([with_chain(own)], 0.0)[0]

    assert isinstance(decision, VerifyNodes)
    assert [node.token for node in decision.nodes] == list(CHAIN[:length])


@pytest.mark.parametrize(("own", "length"), [(None, 3), (1, 1), (5, 5)])
def test_the_draft_is_asked_for_chains_of_the_requests_own_k(own: int | None, length: int):
    sd, ssd = (STRATEGIES[name](Options(strategy=name, draft_tokens=3)) for name in ("sd", "ssd"))

    chain, fan_out = sd.plan(Estimates(), 1, own), ssd.plan(Estimates(), 1, own)

    assert chain == Chain(length)
    assert isinstance(fan_out, FanOut)
    assert (fan_out.depth, len(fan_out.fan)) == (length, length + 1)


@pytest.mark.parametrize(("strategy", "fallback"), [("adaptive", "adaptive"), ("ssd", "fast"), ("ssd", "adaptive")])
def test_prompt_lookup_guesses_only_where_it_is_on(strategy: Any, fallback: Any):
    def verified(lookup: Any) -> list[int]:
        options = Options(strategy=strategy, fallback=fallback, lookup=lookup)
        decision = STRATEGIES[strategy](options).decide([without_draft([(7, 0.99), (8, 0.99)])], 0.0)[0]
        assert isinstance(decision, VerifyNodes)
        return [node.token for node in decision.nodes]

    assert verified("on") == [7, 8]
    assert verified("off") == []


# The speculation cache ---------------------------------------------------------------------------


TOP = NodeId(7)


def test_guesses_that_are_given_up_leave_an_empty_tree_and_a_miss():
    speculation = Speculation(TOP, 3, 10, Estimates(), wanted=True, now=0.0)
    speculation.start(0, 0.0)
    speculation.merge(Grow(RequestId(1), 0, (TOP,), (5,), (0.9,), 1, 0.01), vocabulary=100, now=1.0)
    below = speculation.tree.root.children[5].id
    speculation.merge(Grow(RequestId(1), 0, (below,), (6,), (0.5,), 1, 0.01), vocabulary=100, now=1.0)
    hit = speculation.commit([5], round=1, now=2.0)
    speculation.begin_anew(1, now=2.0)
    speculation.prune()

    assert hit
    assert list(speculation.tree) == [speculation.tree.root]
    assert speculation.lag(since=2.5) == 0.5
