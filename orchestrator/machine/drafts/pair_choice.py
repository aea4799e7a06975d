"""The target and the draft in force: the default pair where the user names none. Starts no pipeline."""

from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.downloads.default_target import default_target
from orchestrator.machine.drafts.draft_choice import DraftChoice, draft_for
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.machine.progress import OnProgress
from protocol.contracts.engines import DraftEngineName


class PairChoice(NamedTuple):
    target: Path
    draft: DraftChoice
    """Its note is about the draft alone."""
    note: str
    """One line for the user if the target is not the one to be expected."""


def pair_for(
    target: str | None, engine: DraftEngineName, draft: str | None, on_progress: OnProgress, *, own: bool = False
) -> PairChoice:
    """The folders of these names (None: the default), fetched or converted on first use; `engine` is the draft's.

    `own`: a program of the user is the draft. Raises InputError for a model that can't be had.
    """
    note = ""
    if target is None:
        found = default_target(on_progress)
        target, note = str(found.folder), found.note
    choice = draft_for(target, engine, draft, on_progress, own=own)
    return PairChoice(resolve(target, "target", on_progress), choice, note)
