"""The four strategies: what the draft should grow, and what the target should verify next. Pure.

`adaptive` has a file of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from orchestrator.core.options import Options
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import Decision, SequenceView, VerifyNodes, WaitUntil, patience_with
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.policy.expected_rate import best_count
from orchestrator.core.policy.fan_out import geometric_fan_out
from protocol.messages.plans import Chain, FanOut, GrowthPlan
from protocol.speculation.token_tree import Node


class _EachForItself(ABC):
    """What a request sends does not depend on the others of its round."""

    @abstractmethod
    def decide(self, view: SequenceView) -> Decision: ...

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        return [self.decide(view) for view in views]


class Autoregressive(_EachForItself):
    """`ar`: the target alone."""

    drafts = caches = False

    def __init__(self, options: Options) -> None:
        pass

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        return None

    def decide(self, view: SequenceView) -> Decision:
        return VerifyNodes([])


class Sequential(_EachForItself):
    """`sd`: draft K tokens, then verify, in turns (Leviathan et al. 2023)."""

    drafts, caches = True, False

    def __init__(self, options: Options) -> None:
        self._depth = options.draft_tokens

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        return Chain(self._depth)

    def decide(self, view: SequenceView) -> Decision:
        return await_chain(view, self._depth)


class PublishedSsd(_EachForItself):
    """`ssd`: chains of K, speculated for every likely outcome while the target verifies (arXiv 2603.03251)."""

    drafts = caches = True

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        options = self._options
        fan = geometric_fan_out(
            estimates.acceptance.get(0.0), estimates.hits.exponent, options.draft_tokens, options.fan_budget
        )
        return FanOut(options.draft_tokens, tuple(min(64, guesses) for guesses in fan), options.saguaro)

    def decide(self, view: SequenceView) -> Decision:
        missed = view.cache.empty
        if not missed or self._options.fallback == "neural":
            return await_chain(view, self._options.draft_tokens)
        if self._options.fallback == "fast":
            return VerifyNodes(self._free(view)[0])
        return self._weigh(view)

    def _weigh(self, view: SequenceView) -> Decision:
        """A miss: draft K tokens just in time, or go on with what is free, whichever promises the higher rate."""
        depth, estimates = min(self._options.draft_tokens, view.room), view.estimates
        acceptance = estimates.acceptance.get(0.0)
        chain = [acceptance ** (k + 1) for k in range(depth)]
        waiting = (depth + 0.5) * estimates.step.get(0.0)
        hop = estimates.hop.get(0.0)
        late = (1.0 + sum(chain)) / (waiting + estimates.target(1 + depth) + hop)
        free, rate = self._free(view)
        if view.drafting and view.ready_at <= view.now and estimates.step.count and late > rate:
            return await_chain(view, depth)
        return VerifyNodes(free)

    def _free(self, view: SequenceView) -> tuple[list[Node], float]:
        """The free guesses that are worth verifying, and what rate they promise; none is plain decoding."""
        chain = view.free_chain(view.cache.root)
        choice = best_count(view.paths(chain), view.estimates.target, view.estimates.hop.get(0.0))
        return chain[: choice.nodes], choice.rate


STRATEGIES: dict[str, type[Autoregressive | Sequential | PublishedSsd | Adaptive]] = {
    "ar": Autoregressive,
    "sd": Sequential,
    "ssd": PublishedSsd,
    "adaptive": Adaptive,
}


def await_chain(view: SequenceView, depth: int) -> Decision:
    """Send the draft's chain of `depth` tokens once it is there; give up on a draft that is silent."""
    depth = min(depth, view.room)
    chain = view.cache.chain(depth)
    if len(chain) >= depth or not view.drafting:
        return VerifyNodes(chain)
    patience = patience_with(view.estimates)
    # Growth renews the patience, but a draft that never gets to the chain can't renew it for ever.
    until = min(max(view.grown_at, view.free_since) + patience, view.free_since + depth * patience)
    return WaitUntil(until) if view.now < until else VerifyNodes(chain, gave_up=True)
