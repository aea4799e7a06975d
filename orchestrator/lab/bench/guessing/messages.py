"""Arguments and reports of a process that counts how often drafts guess a target's texts. Plain types; knows no MLX."""

from typing import TypeAlias

import msgspec

from protocol.contracts.coreml.conversion import Failed
from protocol.contracts.training import Acceptance


class TargetText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the target wrote behind a prompt, with shared noise."""

    tokens: tuple[int, ...]
    """Of the prompt and of the answer."""
    prompt: int
    """How many of them are the prompt's."""
    temperature: float
    seed: int


class ExaminedDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    engine: str
    model: str
    """Folder; empty for an engine without a model."""


class AcceptanceOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one JSON argument of `python -m orchestrator.lab.bench.guessing`."""

    target: str
    drafts: tuple[ExaminedDraft, ...]
    texts: str
    """File with a JSON list of TargetText."""


class AcceptanceProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", forbid_unknown_fields=True):
    name: str
    done: int
    total: int
    """Texts of all drafts."""


class DraftAcceptance(msgspec.Struct, frozen=True, kw_only=True, tag="draft", forbid_unknown_fields=True):
    """One draft on all texts."""

    name: str
    acceptance: tuple[Acceptance, ...]
    """By temperature. A draft that reads tokens alone has one row: it is never stale."""
    seconds_per_guess: float
    """Median, of guesses that follow one another, each a growth step of one node."""


class AcceptanceFinished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """All drafts are reported."""


AcceptanceReport: TypeAlias = AcceptanceProgress | DraftAcceptance | AcceptanceFinished | Failed
"""One JSON object a line of the process's standard output."""
