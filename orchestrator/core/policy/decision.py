"""What a strategy may look at, and what it may decide, when the target is ready for a sequence. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from orchestrator.core.options import Options
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.speculation_cache import SpeculationCache
from protocol.messages.plans import GrowthPlan
from protocol.speculation.token_tree import Node

PATIENCE_SECONDS = 0.2
"""A draft that owes growth and sends none for so long is given up for this round: together with a forward of the target
that is a pause of at most 250 ms."""
_PATIENCE_STEPS = 8
_MAX_PATIENCE_SECONDS = 2.0
"""Whatever time a draft claims for its steps."""
_MAX_LOOKUP_TOKENS = 4
"""Longest chain of guesses by prompt lookup."""


@dataclass(frozen=True, slots=True)
class VerifyNodes:
    """Verify these nodes, parents first; none is plain decoding."""

    nodes: list[Node]
    gave_up: bool = False
    """The draft should have delivered by now and did not."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Waiting for growth pays, until then (seconds on the orchestrator's clock)."""

    until: float


Decision: TypeAlias = VerifyNodes | WaitUntil


@dataclass(slots=True)
class SequenceView:
    """What a strategy may look at when the target is ready for a sequence. Times are the orchestrator's."""

    cache: SpeculationCache
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
    guess: Callable[[Node, int], list[tuple[int, float]]]
    """A chain of at most so many guesses by prompt lookup behind a node, each with its believed probability."""

    def paths(self, nodes: Sequence[Node]) -> list[float]:
        """The path probability of each node."""
        return [self.cache.tree.path_probability(node) for node in nodes]

    def lookup_chain(self, leaf: Node) -> list[Node]:
        """Guesses behind `leaf` by prompt lookup: they cost no forward of a draft."""
        limit = min(_MAX_LOOKUP_TOKENS, self.cache.root.depth + self.room - leaf.depth)
        return self.cache.loose_chain(leaf, self.guess(leaf, limit))


class Strategy(Protocol):
    """One way to speculate. It keeps no state of a request, only what it adapts across rounds."""

    name: str
    summary: str
    """A few words for the help of the command line."""
    drafts: bool
    """It uses a draft."""
    caches: bool
    """The draft works while the target verifies, so that rounds can be hits or misses."""

    def __init__(self, options: Options) -> None: ...

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        """How a draft is to grow one of `sharing` requests that share its steps; None without a draft."""
        ...

    def decide(self, view: SequenceView) -> Decision: ...

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        """Decide for requests whose trees can share one forward of the target, a decision each."""
        ...


def patience(estimates: Estimates) -> float:
    """Seconds after which a silent draft that owes growth is not waited for."""
    return min(_MAX_PATIENCE_SECONDS, max(PATIENCE_SECONDS, _PATIENCE_STEPS * estimates.step.get(0.0)))
