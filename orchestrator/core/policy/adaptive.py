"""`adaptive`: the expected-rate rule decides every round, for all requests of the round together. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge

from orchestrator.core.options import Options
from orchestrator.core.policy.decision import PATIENCE_SECONDS, Decision, SequenceView, VerifyNodes, WaitUntil
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.policy.expected_rate import best_counts, with_growth
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.speculation.token_tree import Node

_MIN_WIDTH = 4
"""Nodes of one tree that a growth step evaluates at least, however many trees share the step."""


class Adaptive:
    """The expected-rate rule decides how many nodes to verify and whether to wait for growth."""

    name, summary = "adaptive", "whatever promises the most tokens a second"
    drafts = caches = True
    _MARGIN = 1.02
    """Waiting must promise this much more: its gain is an estimate, its cost is certain."""
    _EXPENSIVE = 1.2

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        width = self._width(estimates)
        return BestFirst(max(min(_MIN_WIDTH, width), width // sharing), self._options.draft_fan)

    def _width(self, estimates: Estimates) -> int:
        """Half of `draft_width` if the other half, with the less probable nodes, was measured to be expensive."""
        full, cost = self._options.draft_width, estimates.growth
        half = max(1, full // 2)
        return half if cost.known and cost(full) > self._EXPENSIVE * cost(half) else full

    def decide(self, view: SequenceView) -> Decision:
        return self.decide_together([view])[0]

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        """Verify the most probable nodes of all trees, wherever they are, and the root of each request."""
        drafted = [_usable(view, self._options.max_verify) for view in views]
        nodes = [_with_lookup(view, own)[: self._options.max_verify] for view, own in zip(views, drafted, strict=True)]
        paths = [view.paths(own) for view, own in zip(views, nodes, strict=True)]
        now = best_counts(paths, views[0].estimates.target, views[0].estimates.hop.get(0.0))
        expected = [self._expected_growth(view, own) for view, own in zip(views, drafted, strict=True)]
        until = self._wait_until(views, paths, expected, now.rate)
        if until is not None:
            return [WaitUntil(until)] * len(views)
        return [VerifyNodes(own[:count]) for own, count in zip(nodes, now.nodes, strict=True)]

    def _expected_growth(self, view: SequenceView, nodes: list[Node]) -> "_ExpectedGrowth | None":
        """What the next growth should bring, and when; None if there is none to wait for."""
        estimates = view.estimates
        if not view.drafting or not estimates.step.count or not estimates.target.known:
            return None
        step = estimates.step.get(0.0)
        # After a miss, the step in flight grows the old root: its rest passes before the new root's step begins.
        recovery = max(estimates.recovery.get(1.5 * step), view.lag)
        due = view.ready_since + recovery if view.cache.empty else view.grown_at + step
        due = max(due, view.draft_ready_at + step) if view.draft_ready_at > view.now else due
        # A draft may claim any time for its steps: past the due time no more than the patience is spent on it.
        give_up = due + min(step, PATIENCE_SECONDS)
        if give_up <= view.now or give_up == math.inf:
            return None
        paths = view.paths(nodes)
        open_paths = [path for node, path in zip(nodes, paths, strict=True) if not node.children]
        if view.cache.empty:
            open_paths = [1.0]
        later = with_growth(paths, open_paths[: self._width(estimates)], estimates.acceptance.get(0.0))
        return _ExpectedGrowth(due, give_up, later[: self._options.max_verify])

    def _wait_until(
        self,
        views: Sequence[SequenceView],
        paths: list[list[float]],
        expected: "list[_ExpectedGrowth | None]",
        rate: float,
    ) -> float | None:
        """When to stop waiting for the next growth, if waiting promises a higher rate than `rate`; else None.

        One growth step serves several trees: what is due within half a step of the first is awaited together.
        """
        growths = [growth for growth in expected if growth is not None]
        if not growths:
            return None
        estimates, now = views[0].estimates, views[0].now
        first = max(now, min(growth.due for growth in growths))
        horizon = first + 0.5 * estimates.step.get(0.0)
        awaited = [growth for growth in growths if growth.due <= horizon]
        later = [
            own if growth is None or growth.due > horizon else growth.paths
            for own, growth in zip(paths, expected, strict=True)
        ]
        wait = max(0.0, max(growth.due for growth in awaited) - now)
        best = best_counts(later, estimates.target, estimates.hop.get(0.0) + wait)
        return max(growth.give_up for growth in awaited) if best.rate > rate * self._MARGIN else None


@dataclass(frozen=True, slots=True)
class _ExpectedGrowth:
    """Growth to come."""

    due: float
    give_up: float
    """When to stop waiting for it."""
    paths: list[float]
    """Path probabilities of the nodes there may be then, falling."""


def _usable(view: SequenceView, limit: int) -> list[Node]:
    """The `limit` most probable nodes that the request still has room for, parents first."""
    deepest = view.cache.root.depth + view.room
    nodes: list[Node] = []
    for node in view.cache.tree.best():
        if len(nodes) == limit:
            break
        if node.depth <= deepest:
            nodes.append(node)
    return nodes


def _with_lookup(view: SequenceView, nodes: list[Node]) -> list[Node]:
    """The draft's nodes with guesses by prompt lookup behind the most probable leaf, by falling path probability."""
    leaf = next((node for node in nodes or [view.cache.root] if not node.children), None)
    lookup = [] if leaf is None else view.lookup_chain(leaf)
    return list(merge(nodes, lookup, key=lambda node: -node.log_path))
