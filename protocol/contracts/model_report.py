"""The report of a process that loads a target and finds its level, or loads a trained drafter. Plain types."""

from typing import Literal

import msgspec


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, tag="report", forbid_unknown_fields=True):
    """A target that is served."""

    architecture: str
    level: Literal["tree", "chain", "plain"]
    """A `Level`: what one forward evaluates."""
    reason: str
    """Why it is not a higher level; empty at the highest."""
    joins: bool
    """One forward evaluates several sequences."""
    recorded_layers: int = 0
    """Layers whose outputs can be recorded for a trained drafter; 0 if none can."""
    context: int


class ModelRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal", forbid_unknown_fields=True):
    """A model that can't be served."""

    text: str
    """The sentence that says why, and what to do."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded", forbid_unknown_fields=True):
    """A trained drafter that can be served."""
