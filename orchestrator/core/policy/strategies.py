"""The strategies by name, and those that verify chains: `ar`, `sd` and `ssd`. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice

from orchestrator.core.estimates import Estimates
from orchestrator.core.expected_rate import best_count
from orchestrator.core.options import Options
from orchestrator.core.policy.adaptive import Adaptive
from orchestrator.core.policy.decision import Decision, Strategy, VerifyNodes, WaitUntil
from orchestrator.core.request import Request
from protocol.messages.base import MAX_FAN
from protocol.messages.plans import Chain, FanOut, GrowthPlan
from protocol.speculation.token_tree import Node


class IndependentRequests(ABC):
    """A strategy that decides for each request alone, whatever other requests share the forward."""

    refreshes = False

    @abstractmethod
    def decide_alone(self, request: Request, now: float) -> Decision: ...

    def decide(self, requests: Sequence[Request], now: float) -> list[Decision]:
        return [self.decide_alone(request, now) for request in requests]


class Autoregressive(IndependentRequests):
    """`ar`: one token a forward."""

    name, summary = "ar", "target alone"
    drafts = caches = False

    def __init__(self, options: Options) -> None:
        pass

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        return None

    def decide_alone(self, request: Request, now: float) -> Decision:
        return VerifyNodes([], goes_on=True)


class Sequential(IndependentRequests):
    """`sd`: draft K tokens, then verify them, in turns (Leviathan et al. 2023)."""

    name, summary = "sd", "draft and verify in turns"
    drafts, caches = True, False

    def __init__(self, options: Options) -> None:
        self._depth = options.draft_tokens

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        return Chain(draft_tokens or self._depth)

    def decide_alone(self, request: Request, now: float) -> Decision:
        return await_chain(request, request.task.draft_tokens or self._depth, now)


def await_chain(request: Request, depth: int, now: float) -> Decision:
    """Verify the draft's chain of `depth` tokens once it has grown; do not wait longer for a silent draft."""
    depth = min(depth, request.room)
    chain = list(islice(request.tree.main_chain(), depth))
    if len(chain) >= depth or not request.speculation.drafting:
        return VerifyNodes(chain)
    limit = request.estimates.growth_timeout
    # Growth prolongs the wait, but by no more than the chain's steps take: a draft may grow other nodes without end.
    longest = limit + depth * request.estimates.step.get(0.0)
    until = min(max(request.speculation.grown_at, request.ready_since) + limit, request.ready_since + longest)
    return WaitUntil(until) if now < until else VerifyNodes(chain, draft_silent=True)


class PublishedSsd(IndependentRequests):
    """`ssd`: the published speculation cache (arXiv 2603.03251, "Speculative Speculative Decoding").

    Chains of K tokens are speculated for every likely outcome while the target verifies. On a hit, verify the chain in
    the tree; on a miss, fall back as `Options.fallback` says.
    """

    name, summary = "ssd", "the published parallel algorithm"
    drafts = caches = True

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        options, depth = self._options, draft_tokens or self._options.draft_tokens
        fan = geometric_fan_out(estimates.acceptance.get(0.0), estimates.hits.exponent, depth, options.fan_budget)
        return FanOut(depth, tuple(min(MAX_FAN, guesses) for guesses in fan))

    def decide_alone(self, request: Request, now: float) -> Decision:
        missed = not request.tree.root.children
        if not missed or self._options.fallback == "neural":
            return await_chain(request, self._depth(request), now)
        if self._options.fallback == "fast":
            return VerifyNodes(self._lookup(request)[0])
        return self._fall_back(request, now)

    def _fall_back(self, request: Request, now: float) -> Decision:
        """After a miss: wait for K draft tokens or use prompt lookup, whichever has the higher expected rate."""
        depth, estimates = min(self._depth(request), request.room), request.estimates
        acceptance = estimates.acceptance.get(0.0)
        chain = [acceptance ** (k + 1) for k in range(depth)]
        waiting = (depth + 0.5) * estimates.step.get(0.0)
        just_in_time = (1.0 + sum(chain)) / (waiting + estimates.target(1 + depth) + estimates.hop.get(0.0))
        nodes, rate = self._lookup(request)
        ready = request.speculation.drafting and request.speculation.ready_at <= now and estimates.step.count
        return await_chain(request, depth, now) if ready and just_in_time > rate else VerifyNodes(nodes)

    def _depth(self, request: Request) -> int:
        """K of this request."""
        return request.task.draft_tokens or self._options.draft_tokens

    def _lookup(self, request: Request) -> tuple[list[Node], float]:
        """The guesses by prompt lookup that are worth verifying, and their rate. No guess is plain decoding."""
        chain = request.guesses_behind(request.tree.root) if self._options.lookup == "on" else []
        estimates = request.estimates
        best = best_count(request.tree.path_probabilities(chain), estimates.target, estimates.hop.get(0.0))
        return chain[: best.nodes], best.rate


def geometric_fan_out(acceptance: float, exponent: float, depth: int, budget: int) -> tuple[int, ...]:
    """Guesses F_0..F_depth with sum `budget`, optimal under the hit model 1 - p_hit(F) = F^-r.

    F_k = F_0 a^(k/(1+r)) for k < K and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r))
    (arXiv 2603.03251, section on the cache topology).

    `acceptance` a in [0, 1], `exponent` r > 0, `depth` K >= 1, `budget` B >= 0.
    """
    accepted = min(max(acceptance, 0.01), 0.99)
    shape = [accepted ** (k / (1 + exponent)) for k in range(depth)]
    shape.append(accepted ** (depth / (1 + exponent)) * (1 - accepted) ** (-1 / (1 + exponent)))
    return apportion(shape, budget)


def apportion(shape: Sequence[float], budget: int) -> tuple[int, ...]:
    """Whole numbers in proportion to `shape` that sum to exactly `budget` (largest remainders first)."""
    scale = budget / sum(shape)
    floors = [int(scale * share) for share in shape]
    remainders = sorted(range(len(shape)), key=lambda k: floors[k] - scale * shape[k])
    for k in remainders[: budget - sum(floors)]:
        floors[k] += 1
    return tuple(floors)


STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Autoregressive, Sequential, PublishedSsd, Adaptive)
}
"""Options of the command line, the bench and the planner derive from this table."""
