"""What a strategy may look at, and what it may decide, when the target is ready for a request. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from orchestrator.core.options import Options
from orchestrator.core.policy.estimates import Estimates
from protocol.messages.base import Level
from protocol.messages.plans import GrowthPlan
from protocol.speculation.token_tree import Node, TokenTree


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


Decision: TypeAlias = VerifyNodes | WaitUntil


@dataclass(slots=True)
class RequestView:
    """What a strategy may look at when the target is ready for a request. Times are the orchestrator's."""

    tree: TokenTree
    estimates: Estimates
    now: float
    ready_since: float
    """When the root became known."""
    grown_at: float
    """When the last growth for this request arrived, or its draft was started."""
    room: int
    """Most tokens below the root that can still be used."""
    drafting: bool
    """A draft grows this request and is not silent."""
    lag: float
    """Seconds by which the draft was behind when the root became known."""
    draft_ready_at: float
    """When the draft has prefilled the prompt; infinite if that is unknown."""
    lookup: Callable[[Node], list[Node]]
    """A chain of guesses by prompt lookup behind a node. They are no nodes of the tree, since no draft grew them."""
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
    plain_rounds: int = 0
    """Rounds in succession whose trees had no nodes."""
    level: Level = "tree"
    """What the target verifies: any tree of guesses, or one path of them. Without guesses no strategy is asked."""


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

        `draft_tokens`: the request's own K, as in `RequestView`.
        """
        ...

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        """One decision for each of the requests, whose trees can share one forward of the target."""
        ...
