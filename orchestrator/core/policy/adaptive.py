"""`adaptive`: one rule for every round, the expected rate; what several requests send is decided together. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge

from orchestrator.core.options import Options
from orchestrator.core.policy.decision import PATIENCE, Decision, SequenceView, VerifyNodes, WaitUntil
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.policy.expected_rate import best_share, with_growth
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.speculation.token_tree import Node

_LEAST_WIDTH = 4
"""Nodes that a step grows of one tree, however many trees there are: of each the target verifies only a few."""


class Adaptive:
    """`adaptive`: the expected-rate rule decides how many nodes to verify and whether to wait."""

    drafts = caches = True
    _MARGIN = 1.02
    """Waiting must promise this much more: its gain is a guess, its cost is not."""
    _DEAR = 1.2

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        width = self._width(estimates)
        return BestFirst(max(min(_LEAST_WIDTH, width), width // sharing), self._options.draft_fan)

    def _width(self, estimates: Estimates) -> int:
        """Half of what is allowed if the other half was measured to be dear: it holds the less probable nodes."""
        most, cost = self._options.draft_width, estimates.growth
        half = max(1, most // 2)
        return half if cost.known and cost(most) > self._DEAR * cost(half) else most

    def decide(self, view: SequenceView) -> Decision:
        return self.decide_together([view])[0]

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        """The most probable nodes of all trees, however they are spread, and a token of each request at least."""
        drafted = [_usable(view, self._options.max_verify) for view in views]
        nodes = [_extended(view, own)[: self._options.max_verify] for view, own in zip(views, drafted, strict=True)]
        paths = [view.paths(own) for view, own in zip(views, nodes, strict=True)]
        now = best_share(paths, views[0].estimates.target, views[0].estimates.hop.get(0.0))
        grown = [self._prospect(view, own) for view, own in zip(views, drafted, strict=True)]
        until = self._wait_until(views, paths, grown, now.rate)
        if until is not None:
            return [WaitUntil(until)] * len(views)
        return [VerifyNodes(own[:count]) for own, count in zip(nodes, now.counts, strict=True)]

    def _prospect(self, view: SequenceView, nodes: list[Node]) -> "_Prospect | None":
        """What the next growth should bring, and when; None if there is none to wait for."""
        estimates = view.estimates
        if not view.drafting or not estimates.step.count or not estimates.target.known:
            return None
        step = estimates.step.get(0.0)
        # After a miss a step in flight grows the old root: its rest passes before the new root's begins.
        recovery = max(estimates.recovery.get(1.5 * step), view.owing)
        due = view.free_since + recovery if view.cache.empty else view.grown_at + step
        due = max(due, view.ready_at + step) if view.ready_at > view.now else due
        # A draft may claim any time for its steps: past the due time no more than patience is spent on it.
        late = due + min(step, PATIENCE)
        if late <= view.now or late == math.inf:
            return None
        paths = view.paths(nodes)
        open_paths = [path for node, path in zip(nodes, paths, strict=True) if not node.children]
        if view.cache.empty:
            open_paths = [1.0]
        later = with_growth(paths, open_paths[: self._width(estimates)], estimates.acceptance.get(0.0))
        return _Prospect(due, late, later[: self._options.max_verify])

    def _wait_until(
        self, views: Sequence[SequenceView], paths: list[list[float]], grown: "list[_Prospect | None]", rate: float
    ) -> float | None:
        """When the next growth should be there, if waiting for it promises a higher rate. One growth step serves
        several trees: what is due within half a step of the first is waited for together."""
        prospects = [prospect for prospect in grown if prospect is not None]
        if not prospects:
            return None
        estimates, now = views[0].estimates, views[0].now
        first = max(now, min(prospect.due for prospect in prospects))
        awaited = first + 0.5 * estimates.step.get(0.0)
        together = [prospect for prospect in prospects if prospect.due <= awaited]
        later = [
            own if prospect is None or prospect.due > awaited else prospect.paths
            for own, prospect in zip(paths, grown, strict=True)
        ]
        wait = max(0.0, max(prospect.due for prospect in together) - now)
        best = best_share(later, estimates.target, estimates.hop.get(0.0) + wait)
        return max(prospect.late for prospect in together) if best.rate > rate * self._MARGIN else None


@dataclass(frozen=True, slots=True)
class _Prospect:
    """Growth to come."""

    due: float
    late: float
    """Until when it is waited for."""
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


def _extended(view: SequenceView, nodes: list[Node]) -> list[Node]:
    """The draft's nodes and, behind the most probable leaf, free guesses: by falling path probability."""
    leaf = next((node for node in nodes or [view.cache.root] if not node.children), None)
    free = [] if leaf is None else view.free_chain(leaf)
    return list(merge(nodes, free, key=lambda node: -node.log_path))
