"""Laws of K and of the switch of prompt lookup: what strategies ask of the draft and of the target."""

from typing import Any

import pytest

from orchestrator.core.options import Options
from orchestrator.core.policy.decision import SequenceView, VerifyNodes
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.core.speculation import Speculation
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import Chain, FanOut
from protocol.messages.worker import Grow
from protocol.speculation.token_tree import node_id
from tests.support.sequence_views import sequence_view

ROOT, VOCABULARY = NodeId(1), 100
CHAIN = (7, 8, 9, 10)


def with_chain(draft_tokens: int | None = None) -> SequenceView:
    """A request whose draft has grown four nodes, one below the other."""
    estimates = Estimates()
    estimates.target.observe(1, 0.02)
    speculation = Speculation(ROOT, 3, 5, estimates, True, 0.0)
    speculation.start(0, 0.0)
    parent = ROOT
    for token in CHAIN:
        speculation.merge(Grow(SequenceId(1), 0, (parent,), (token,), (0.9,), 1, 0.001), VOCABULARY, 0.0)
        parent = node_id(parent, token)
    return _view(speculation, draft_tokens)


def without_draft(guesses: list[tuple[int, float]]) -> SequenceView:
    """A request with guesses by prompt lookup alone."""
    estimates = Estimates()
    estimates.target.observe(1, 0.02)
    estimates.target.observe(8, 0.021)
    view = _view(Speculation(ROOT, 3, 5, estimates, True, 0.0), None)
    view.lookup = lambda node, limit: guesses[:limit]
    return view


def _view(speculation: Speculation, draft_tokens: int | None) -> SequenceView:
    fields = {"drafting": speculation.drafting, "draft_tokens": draft_tokens}
    return sequence_view(speculation.tree, speculation.estimates, **fields)


@pytest.mark.parametrize("strategy", ["sd", "ssd"])
@pytest.mark.parametrize(("own", "length"), [(None, 3), (1, 1), (2, 2), (4, 4)])
def test_a_request_with_a_k_of_its_own_gets_chains_of_that_length(strategy: str, own: int | None, length: int):
    decision = STRATEGIES[strategy](Options(strategy=strategy, draft_tokens=3)).decide(with_chain(own))

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
        decision = STRATEGIES[strategy](options).decide(without_draft([(7, 0.99), (8, 0.99)]))
        assert isinstance(decision, VerifyNodes)
        return [node.token for node in decision.nodes]

    assert verified("on") == [7, 8]
    assert verified("off") == []
