"""What a strategy may look at, and what it may decide, when the target is ready for a request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from orchestrator.core.estimates import Estimates, Instead
from orchestrator.core.options import Options
from orchestrator.core.request import Request
from protocol.messages.plans import GrowthPlan
from protocol.speculation.token_tree import Node


@dataclass(frozen=True, slots=True)
class VerifyNodes:
    """Verify these nodes, parents first; no node is plain decoding."""

    nodes: list[Node]
    draft_silent: bool = False
    """Growth of the draft is overdue."""
    goes_on: bool = False
    """Without nodes: the next round will hardly have any, so the target may begin it before it is asked."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Waiting for growth pays, until then (seconds on the orchestrator's clock)."""

    until: float
    steps: int | None = None
    """A resting draft is to grow up to this many steps below the root."""
    instead: Instead | None = None


Decision: TypeAlias = VerifyNodes | WaitUntil


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

        `draft_tokens`: the request's own K, for strategies that verify chains; None for the option's.
        """
        ...

    def decide(self, requests: Sequence[Request], now: float) -> list[Decision]:
        """One decision for each of the requests, whose trees can share one forward of the target."""
        ...
