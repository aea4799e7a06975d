"""Which of the drafts that are shipped with the package fits a target: the default target's own, or the demo draft."""

from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.downloads.default_target import default_target, is_default_target
from orchestrator.machine.drafts.packed_draft import whole_draft
from orchestrator.machine.models.checkpoints import demo_model, worker_folder
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint


class DefaultDraft(NamedTuple):
    folder: Path
    note: str = ""
    """One line for the user if it is the demo draft because the default target can't be had."""


def default_draft(on_progress: OnProgress = silent) -> DefaultDraft:
    """The default target's draft. It has that target's embedding, so the target is fetched on first use.

    Without a network, and if the environment asks for the demo pair, it is the demo draft. Raises InputError as
    `default_target` and `whole_draft` do.
    """
    target, note = default_target(on_progress)
    if is_default_target(target):
        return DefaultDraft(whole_draft(packed_draft(), target), note)
    return DefaultDraft(demo_model("draft"), note)


def shipped_draft(target: Path) -> Path | None:
    """The draft that is shipped for the model in the folder `target`; None if there is none.

    The default target's draft serves that target alone, since it was trained on its answers and has its embedding. The
    demo draft serves every target with its tokenizer.
    """
    if is_default_target(target):
        return whole_draft(packed_draft(), target)
    demo = demo_model("draft")
    return demo if vocabulary_fingerprint(demo) == vocabulary_fingerprint(target) else None


def packed_draft() -> Path:
    """Folder of the default target's draft as it is shipped."""
    return worker_folder("draft") / "default_draft"
