"""What a strategy may look at, and what it may decide, when the target is ready for a sequence. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from orchestrator.core.options import Options
from orchestrator.core.policy.estimates import Estimates
from protocol.messages.base import Level
from protocol.messages.plans import GrowthPlan
from protocol.speculation.token_tree import Node, TokenTree, node_id

MIN_GROWTH_TIMEOUT = 0.2
"""Seconds. The least time that a strategy waits for growth that is due: together with a forward of the target that is
a pause of at most 250 ms."""
_MAX_GROWTH_TIMEOUT = 2.0
"""Seconds, whatever time a draft claims for its steps."""
_TIMEOUT_STEPS = 8
_MAX_LOOKUP_TOKENS = 4
"""Longest chain of guesses by prompt lookup."""


@dataclass(frozen=True, slots=True)
class VerifyNodes:
    """Verify these nodes, parents first; no node is plain decoding."""

    nodes: list[Node]
    draft_silent: bool = False
    """Growth of the draft is overdue."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Waiting for growth pays, until then (seconds on the orchestrator's clock)."""

    until: float
    steps: int | None = None
    """A resting draft is to grow up to this many steps below the root."""


Decision: TypeAlias = VerifyNodes | WaitUntil


@dataclass(slots=True)
class SequenceView:
    """What a strategy may look at when the target is ready for a sequence. Times are the orchestrator's."""

    tree: TokenTree
    estimates: Estimates
    now: float
    ready_since: float
    """When the root became known."""
    grown_at: float
    """When the last growth for this sequence arrived, or its draft was started."""
    room: int
    """Most tokens below the root that can still be used."""
    drafting: bool
    """A draft grows this sequence and is not silent."""
    lag: float
    """Seconds by which the draft was behind when the root became known."""
    draft_ready_at: float
    """When the draft has prefilled the prompt; infinite if that is unknown."""
    lookup: Callable[[Node, int], list[tuple[int, float]]]
    """A chain of at most so many guesses by prompt lookup behind a node, each a token and its believed probability."""
    steps: int = 0
    """Growth steps of the draft since it knows the present root."""
    in_turns: bool = False
    """The draft rests until it is asked for a step."""
    resting: bool = False
    """The draft drafts in turns and has taken all steps that it was asked for."""
    reading_until: float = 0.0
    """Until when the target lets a draft on its device read the prompt alone."""
    asked_at: float = 0.0
    """When a draft that drafts in turns was last asked for a step."""
    draft_tokens: int | None = None
    """The request's own K, for strategies that verify chains; None for the option's."""
    level: Level = "tree"
    """What the target verifies: any tree of guesses, or one path of them. Without guesses no strategy is asked."""

    def path_probabilities(self, nodes: Sequence[Node]) -> list[float]:
        """The path probability of each node."""
        root, exp = self.tree.root.log_path, math.exp
        return [exp(node.log_path - root) for node in nodes]

    def lookup_chain(self, leaf: Node) -> list[Node]:
        """Guesses behind `leaf` by prompt lookup. They are no nodes of the tree, since no draft grew them."""
        limit = min(_MAX_LOOKUP_TOKENS, self.tree.root.depth + self.room - leaf.depth)
        nodes: list[Node] = []
        parent = leaf
        for token, belief in self.lookup(leaf, limit):
            log_path = parent.log_path + math.log(belief)
            parent = Node(node_id(parent.id, token), parent, token, belief, log_path, parent.depth + 1)
            nodes.append(parent)
        return nodes


class Strategy(Protocol):
    """One way to speculate. It keeps no state of a request, only what it adapts across rounds."""

    name: str
    summary: str
    """A few words for the help of the command line."""
    drafts: bool
    """The strategy uses a draft."""
    caches: bool
    """The draft works while the target verifies, so that a round is a hit or a miss."""
    refreshes: bool
    """At a hit it may wait for guesses that know the target's latest features (`Freshness`)."""

    def __init__(self, options: Options) -> None: ...

    def plan(self, estimates: Estimates, sharing: int, draft_tokens: int | None) -> GrowthPlan | None:
        """How a draft is to grow one of `sharing` requests that share its steps; None without a draft.

        `draft_tokens`: the request's own K, as in `SequenceView`.
        """
        ...

    def decide(self, view: SequenceView) -> Decision: ...

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        """One decision for each of the requests, whose trees can share one forward of the target."""
        ...


def growth_timeout(estimates: Estimates) -> float:
    """Seconds after which growth that is due is not waited for any more."""
    return min(_MAX_GROWTH_TIMEOUT, max(MIN_GROWTH_TIMEOUT, _TIMEOUT_STEPS * estimates.step.get(0.0)))
