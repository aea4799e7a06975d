"""The process that prepares a draft for the Neural Engine while the pipeline decodes: it converts and examines it.

`python -m orchestrator.machine.drafts.preparation ORDER`: a PreparationOrder in JSON; reports as lines of JSON. It runs
with a low priority, and ends when its parent does.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from orchestrator.machine.cache_entries import UnwritableCache
from orchestrator.machine.drafts.auto_draft import AutoDraft, place_of
from orchestrator.machine.drafts.converted_draft import converted_draft, loaded_bytes
from orchestrator.machine.hardware import installed_version, is_quiet, usable_bytes
from orchestrator.machine.memory.budget import size
from orchestrator.machine.neural_engine import examine
from protocol.child_process import claim_output
from protocol.contracts.coreml import Progress, record, recorded
from protocol.errors import InputError, PipelineError
from protocol.worker.process import die_with_parent

_NICENESS = 10


class PreparationOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the process."""

    auto: AutoDraft
    needed: int
    """Bytes that the pipeline needs without Core ML."""
    life: int | None = None
    """A socket shared with the parent; its end of file means that the parent is gone."""


class Preparing(msgspec.Struct, frozen=True, tag="preparing", forbid_unknown_fields=True):
    """What is being done, without a subject."""

    text: str


class Prepared(msgspec.Struct, frozen=True, tag="prepared", forbid_unknown_fields=True):
    """The draft is converted, and the Neural Engine computes what it should."""


class Declined(msgspec.Struct, frozen=True, tag="declined", forbid_unknown_fields=True):
    """The draft can't run on the Neural Engine; the reason, as a clause. It is recorded if it lies in the model."""

    reason: str


PreparationReport: TypeAlias = Preparing | Prepared | Declined
Report: TypeAlias = Callable[[PreparationReport], None]


def main() -> int:
    # The parent handles Ctrl-C and sends SIGTERM; SystemExit then ends the processes that were started here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    report = claim_output()
    order = msgspec.json.decode(sys.argv[-1], type=PreparationOrder)
    if order.life is not None:
        die_with_parent(order.life, lambda: os.kill(os.getpid(), signal.SIGTERM))
    os.nice(_NICENESS)
    report(prepare(order.auto, order.needed, report))
    return 0


def prepare(auto: AutoDraft, needed: int, report: Report) -> Prepared | Declined:
    """Convert and examine the draft; what was done before is not done again. Reports what is being done."""
    if installed_version("coremltools") is None:
        return Declined(
            "coremltools is not installed, which has no release for every Python: see launch-pipeline doctor"
        )
    try:
        folder = converted_draft(auto.checkpoint, lambda progress: report(Preparing(_words(progress))))
    except UnwritableCache as error:
        return Declined(str(error))
    except InputError as error:
        auto.record_refusal(str(error))
        return Declined(str(error))
    except PipelineError as error:
        return Declined(str(error))
    # Both engines hold the draft until the trial is over.
    more, available = loaded_bytes(folder), usable_bytes()
    if needed + more > available:
        return Declined(
            f"Core ML would take {size(more)} beside the {size(needed)} that the pipeline needs, which is more than "
            f"the {size(available)} that it may use"
        )
    return _examined(auto, folder, report)


def _examined(auto: AutoDraft, folder: Path, report: Report) -> Prepared | Declined:
    place = place_of(folder)
    verdict = recorded(place)
    if verdict is None or (verdict.choice == "unknown" and is_quiet()):
        verdict = examine(
            folder,
            place,
            auto.runtime,
            examiner=auto.examiner,
            predicts=auto.predicts,
            on_stage=lambda words: report(Preparing(f"examining: {words}")),
        ).verdict
        record(msgspec.structs.replace(verdict, model=auto.checkpoint))
    if verdict.choice == "coreml":
        return Prepared()
    again = "; a start on a quiet machine tries it again" if verdict.choice == "unknown" else ""
    return Declined(verdict.reason + again)


def _words(progress: Progress) -> str:
    return f"{progress.stage}, {progress.done} of {progress.total}"


def _end(*_: object) -> None:
    # Another signal must not interrupt the cleaning up: the orchestrator and the death pipe may both send one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
