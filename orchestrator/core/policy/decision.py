"""What a strategy may look at, and what it may decide, when the target is free. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.speculation_cache import SpeculationCache
from protocol.messages.plans import GrowthPlan
from protocol.speculation.token_tree import Node

PATIENCE = 0.2
"""Seconds without any growth after which a draft that must deliver is given up for this round: with a forward of
the target it makes a pause of at most 250 ms."""
_PATIENT_STEPS = 8
_MOST_PATIENCE = 2.0
"""Seconds, whatever a draft says that its steps take."""
_MOST_FREE = 4
"""Longest chain of free guesses (prompt lookup)."""


@dataclass(frozen=True, slots=True)
class VerifyNodes:
    """Verify these nodes, parents first; none is plain decoding."""

    nodes: list[Node]
    gave_up: bool = False
    """The draft should have delivered by now and did not."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Growth is worth waiting for, until then (seconds on the orchestrator's clock)."""

    until: float


Decision: TypeAlias = VerifyNodes | WaitUntil


@dataclass(slots=True)
class SequenceView:
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

    def paths(self, nodes: Sequence[Node]) -> list[float]:
        """Path probability of each."""
        return [self.cache.tree.path_probability(node) for node in nodes]

    def free_chain(self, leaf: Node) -> list[Node]:
        """Guesses behind `leaf` that cost nothing."""
        most = min(_MOST_FREE, self.cache.root.depth + self.room - leaf.depth)
        return self.cache.loose_chain(leaf, self.guess(leaf, most))


class Strategy(Protocol):
    """One way to speculate. Stateless but for what it adapts across rounds."""

    drafts: bool
    """It wants a draft to grow the tree."""
    caches: bool
    """The draft works on while the target verifies, so that hits mean something."""

    def plan(self, estimates: Estimates, sharing: int) -> GrowthPlan | None:
        """How a draft is to grow one of so many requests that share its steps; None if none should."""
        ...

    def decide(self, view: SequenceView) -> Decision: ...

    def decide_together(self, views: Sequence[SequenceView]) -> list[Decision]:
        """For requests whose trees can share one forward of the target, a decision each."""
        ...


def patience_with(estimates: Estimates) -> float:
    """Seconds after which a draft that owes growth and is silent is not waited for."""
    return min(_MOST_PATIENCE, max(PATIENCE, _PATIENT_STEPS * estimates.step.get(0.0)))
