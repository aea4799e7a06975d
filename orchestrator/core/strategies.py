"""The four strategies: what the draft should grow, and what the target should verify next. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import merge
from typing import Protocol, TypeAlias

from orchestrator.core.controller import Choice, best_count, with_growth
from orchestrator.core.estimates import Estimates
from orchestrator.core.fan_out import geometric_fan_out
from orchestrator.core.options import Options
from orchestrator.core.speculation_cache import SpeculationCache
from protocol.messages import BestFirst, Chain, FanOut, Plan
from protocol.token_tree import Node

_PATIENCE = 0.2
"""Seconds without any growth after which a draft that must deliver is given up for this round: with a forward of
the target it makes a pause of at most 250 ms."""
_PATIENT_STEPS = 8
_MOST_PATIENCE = 2.0
"""Seconds, whatever a draft says that its steps take."""
_MOST_FREE = 4
"""Longest chain of free guesses (prompt lookup)."""


@dataclass(frozen=True, slots=True)
class Send:
    """Verify these nodes, parents first; none is plain decoding."""

    nodes: list[Node]
    gave_up: bool = False
    """The draft should have delivered by now and did not."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Growth is worth waiting for, until then (seconds on the orchestrator's clock)."""

    until: float


Decision: TypeAlias = Send | Wait


@dataclass(slots=True)
class View:
    """What a strategy may look at when the target is free for a sequence."""

    cache: SpeculationCache
    estimates: Estimates
    now: float
    free_since: float
    """When the root became known."""
    grown_at: float
    """When the last growth for this sequence arrived, or its draft was started."""
    room: int
    """Most tokens below the root that can still be used."""
    drafting: bool
    """A draft grows this sequence and has not fallen silent."""
    owing: float
    """Seconds from the first miss below which the draft has yet to grow to when the root became known."""
    ready_at: float
    """When the draft has read the prompt; infinite if nobody knows."""
    guess: Callable[[Node, int], list[tuple[int, float]]]
    """A chain of at most so many free guesses of what follows a node, each with its conditional belief."""


class Strategy(Protocol):
    """One way to speculate. Stateless but for what it adapts across rounds."""

    drafts: bool
    """It wants a draft to grow the tree."""
    caches: bool
    """The draft works on while the target verifies, so that hits mean something."""

    def plan(self, estimates: Estimates) -> Plan | None: ...

    def decide(self, view: View) -> Decision: ...


class Autoregressive:
    """`ar`: the target alone."""

    drafts = caches = False

    def __init__(self, options: Options) -> None:
        pass

    def plan(self, estimates: Estimates) -> Plan | None:
        return None

    def decide(self, view: View) -> Decision:
        return Send([])


class Sequential:
    """`sd`: draft K tokens, then verify, in turns (Leviathan et al. 2023)."""

    drafts, caches = True, False

    def __init__(self, options: Options) -> None:
        self._depth = options.draft_tokens

    def plan(self, estimates: Estimates) -> Plan | None:
        return Chain(self._depth)

    def decide(self, view: View) -> Decision:
        return await_chain(view, self._depth)


class Published:
    """`ssd`: chains of K, speculated for every likely outcome while the target verifies (arXiv 2603.03251)."""

    drafts = caches = True

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates) -> Plan | None:
        options = self._options
        fan = geometric_fan_out(
            estimates.acceptance.get(0.0), estimates.hits.exponent, options.draft_tokens, options.fan_budget
        )
        return FanOut(options.draft_tokens, tuple(min(64, guesses) for guesses in fan), options.saguaro)

    def decide(self, view: View) -> Decision:
        missed = view.cache.empty
        if not missed or self._options.fallback == "neural":
            return await_chain(view, self._options.draft_tokens)
        if self._options.fallback == "fast":
            return Send(self._free(view)[0])
        return self._weigh(view)

    def _weigh(self, view: View) -> Decision:
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
        return Send(free)

    def _free(self, view: View) -> tuple[list[Node], float]:
        """The free guesses that are worth verifying, and what rate they promise; none is plain decoding."""
        chain = free_chain(view, view.cache.root)
        choice = rated(view, chain)
        return chain[: choice.nodes], choice.rate


class Adaptive:
    """`adaptive`: the expected-rate rule decides how many nodes to verify and whether to wait."""

    drafts = caches = True
    _MARGIN = 1.02
    """Waiting must promise this much more: its gain is a guess, its cost is not."""
    _DEAR = 1.2

    def __init__(self, options: Options) -> None:
        self._options = options

    def plan(self, estimates: Estimates) -> Plan | None:
        return BestFirst(self._width(estimates), self._options.draft_fan)

    def _width(self, estimates: Estimates) -> int:
        """Half of what is allowed if the other half was measured to be dear: it holds the less probable nodes."""
        most, cost = self._options.draft_width, estimates.growth
        half = max(1, most // 2)
        return half if cost.known and cost(most) > self._DEAR * cost(half) else most

    def decide(self, view: View) -> Decision:
        drafted = usable(view, self._options.max_verify)
        nodes = extended(view, drafted)[: self._options.max_verify]
        now = rated(view, nodes)
        until = self._wait_until(view, drafted, now.rate)
        return Send(nodes[: now.nodes]) if until is None else Wait(until)

    def _wait_until(self, view: View, nodes: list[Node], rate: float) -> float | None:
        """When the next growth should be there, if waiting for it promises a higher rate."""
        estimates = view.estimates
        if not view.drafting or not estimates.step.count or not estimates.target.known:
            return None
        step = estimates.step.get(0.0)
        # After a miss a step in flight grows the old root: its rest passes before the new root's begins.
        recovery = max(estimates.recovery.get(1.5 * step), view.owing)
        due = view.free_since + recovery if view.cache.empty else view.grown_at + step
        due = max(due, view.ready_at + step) if view.ready_at > view.now else due
        # A draft may claim any time for its steps: past the due time no more than patience is spent on it.
        late = due + min(step, _PATIENCE)
        if late <= view.now or late == math.inf:
            return None
        paths = [view.cache.tree.path_probability(node) for node in nodes]
        open_paths = [path for node, path in zip(nodes, paths, strict=True) if not node.children]
        if view.cache.empty:
            open_paths = [1.0]
        later = with_growth(paths, open_paths[: self._width(estimates)], estimates.acceptance.get(0.0))
        wait = max(0.0, due - view.now)
        best = best_count(later[: self._options.max_verify], estimates.target, estimates.hop.get(0.0) + wait)
        return late if best.rate > rate * self._MARGIN else None


STRATEGIES: dict[str, type[Autoregressive | Sequential | Published | Adaptive]] = {
    "ar": Autoregressive,
    "sd": Sequential,
    "ssd": Published,
    "adaptive": Adaptive,
}


def usable(view: View, limit: int) -> list[Node]:
    """The `limit` most probable nodes that the request still has room for, parents first."""
    deepest = view.cache.root.depth + view.room
    nodes: list[Node] = []
    for node in view.cache.tree.best():
        if len(nodes) == limit:
            break
        if node.depth <= deepest:
            nodes.append(node)
    return nodes


def await_chain(view: View, depth: int) -> Decision:
    """Send the draft's chain of `depth` tokens once it is there; give up on a draft that is silent."""
    depth = min(depth, view.room)
    chain = view.cache.chain(depth)
    if len(chain) >= depth or not view.drafting:
        return Send(chain)
    patience = patience_with(view.estimates)
    # Growth renews the patience, but a draft that never gets to the chain can't renew it for ever.
    until = min(max(view.grown_at, view.free_since) + patience, view.free_since + depth * patience)
    return Wait(until) if view.now < until else Send(chain, gave_up=True)


def patience_with(estimates: Estimates) -> float:
    """Seconds after which a draft that owes growth and is silent is not waited for."""
    return min(_MOST_PATIENCE, max(_PATIENCE, _PATIENT_STEPS * estimates.step.get(0.0)))


def rated(view: View, nodes: list[Node]) -> Choice:
    """How many of these nodes, which fall in probability, to verify, and what rate that promises."""
    paths = [view.cache.tree.path_probability(node) for node in nodes]
    return best_count(paths, view.estimates.target, view.estimates.hop.get(0.0))


def extended(view: View, nodes: list[Node]) -> list[Node]:
    """The draft's nodes and, behind the most probable leaf, free guesses: by falling path probability."""
    leaf = next((node for node in nodes or [view.cache.root] if not node.children), None)
    free = [] if leaf is None else free_chain(view, leaf)
    return list(merge(nodes, free, key=lambda node: -node.log_path))


def free_chain(view: View, leaf: Node) -> list[Node]:
    most = min(_MOST_FREE, view.cache.root.depth + view.room - leaf.depth)
    return view.cache.loose_chain(leaf, view.guess(leaf, most))
