"""`ar` and `sd`: the target alone, and draft and target in turns. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice

from orchestrator.core.options import Options
from orchestrator.core.policy.decision import Decision, SequenceView, VerifyNodes, WaitUntil, growth_timeout
from orchestrator.core.policy.estimates import Estimates
from protocol.messages.plans import Chain, GrowthPlan


class IndependentRequests(ABC):
    """A strategy that decides for each request alone, whatever other requests share the forward."""

    refreshes = False

    @abstractmethod
    def decide(self, view: SequenceView) -> Decision: ...

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        return [self.decide(view) for view in views]


class Autoregressive(IndependentRequests):
    """`ar`: one token a forward."""

    name, summary = "ar", "target alone"
    drafts = caches = False

    def __init__(self, options: Options) -> None:
        pass

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        return None

    def decide(self, view: SequenceView) -> Decision:
        return VerifyNodes([])


class Sequential(IndependentRequests):
    """`sd`: draft K tokens, then verify them, in turns (Leviathan et al. 2023)."""

    name, summary = "sd", "draft and verify in turns"
    drafts, caches = True, False

    def __init__(self, options: Options) -> None:
        self._depth = options.draft_tokens

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        return Chain(draft_tokens or self._depth)

    def decide(self, view: SequenceView) -> Decision:
        return await_chain(view, view.draft_tokens or self._depth)


def await_chain(view: SequenceView, depth: int) -> Decision:
    """Verify the draft's chain of `depth` tokens once it has grown; do not wait longer for a silent draft."""
    depth = min(depth, view.room)
    chain = list(islice(view.tree.main_chain(), depth))
    if len(chain) >= depth or not view.drafting:
        return VerifyNodes(chain)
    limit = growth_timeout(view.estimates)
    # Growth prolongs the wait, but by no more than the chain's steps take: a draft may grow other nodes without end.
    longest = limit + depth * view.estimates.step.get(0.0)
    until = min(max(view.grown_at, view.ready_since) + limit, view.ready_since + longest)
    return WaitUntil(until) if view.now < until else VerifyNodes(chain, draft_silent=True)
