"""Growth plans: parts of messages."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from protocol.messages.base import MAX_FAN, MAX_STEPS, MessagePart, Probability


class BestFirst(MessagePart, frozen=True, tag="best_first"):
    """Grow the most probable unexpanded nodes: `width` a step, `fan` children each; pause when none has at least the
    path probability `least`, and after `steps` steps below one root until an Extend allows more (None: no pause)."""

    width: Annotated[int, Meta(ge=1, le=256)]
    fan: Annotated[int, Meta(ge=1, le=MAX_FAN)]
    least: Probability = 0.0
    steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)] | None = None
    lookup: bool = False
    """Guesses are mixed with those by prompt lookup."""


class Chain(MessagePart, frozen=True, tag="chain"):
    """Grow one chain of `depth` tokens below the root, then pause."""

    depth: Annotated[int, Meta(ge=1, le=256)]


class FanOut(MessagePart, frozen=True, tag="fan_out"):
    """The published SSD speculation: a chain of `depth` tokens, then `fan[k]` guesses of the bonus
    token after k accepted ones (k = 0..depth), each continued by a chain of `depth` tokens."""

    depth: Annotated[int, Meta(ge=1, le=256)]
    fan: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_FAN)], ...], Meta(min_length=2, max_length=257)]


GrowthPlan: TypeAlias = BestFirst | Chain | FanOut
