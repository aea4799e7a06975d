"""The report of a process that loads a target and finds its level, or loads a trained drafter and checks it. The check
of a drafter is kept in a file."""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from protocol.contracts.model_folder import ModelFolder
from protocol.paths import cache_folder
from protocol.security.private_files import keep, kept


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, tag="report", forbid_unknown_fields=True):
    """A target that is served."""

    architecture: str
    level: Literal["tree", "chain", "plain"]
    """A `Level`: what one forward evaluates."""
    reason: str
    """Why it is not a higher level; empty at the highest."""
    deviation: float = 0.0
    """The largest of its logits at this level from those of single tokens, in standard deviations."""
    joins: bool
    """One forward evaluates several sequences."""
    joint_deviation: float | None = None
    """The largest of rows in such a forward from the rows alone; None if they could not be compared."""
    batch_dependent: bool = False
    """That is more than rounding: tokens may depend on the other requests in a forward."""
    recorded_layers: int = 0
    """Layers whose outputs can be recorded for a trained drafter; 0 if none can."""
    context: int


class ModelRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal", forbid_unknown_fields=True):
    """A model that can't be served."""

    text: str
    """The sentence that says why, and what to do."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded", forbid_unknown_fields=True):
    """A trained drafter that can be served."""

    guessed: str
    """Which of its guesses of a text that the target wrote are right, in a sentence."""
    wrong: bool = False
    """Another reading of its config.json does better."""
    first: float = 0.0
    """Share of right first guesses, behind a token whose features are known."""


def recorded(draft: Path, target: Path) -> Loaded | None:
    """What `record` has kept of the two folders as they are now. Raises InputError if they can't be read."""
    return kept(_file(draft, target), Loaded)


def record(draft: Path, target: Path, report: Loaded) -> None:
    keep(_file(draft, target), report)


def _file(draft: Path, target: Path) -> Path:
    """Raises InputError for folders that can't be read."""
    name = hashlib.sha256("".join(ModelFolder(each).fingerprint for each in (draft, target)).encode()).hexdigest()
    return cache_folder() / "drafters" / f"{name}.json"
