"""`launch-pipeline doctor --neural-engine`: convert, examine, judge, and keep the verdict for the pipeline."""

import sys
from collections.abc import Callable, Sequence

from orchestrator.machine.converted_draft import OnProgress, converted_draft
from orchestrator.machine.draft_choice import place_of
from orchestrator.tools.doctor.doctor import Finding
from orchestrator.tools.doctor.examination import EXAMINER, PREDICTS, examine
from orchestrator.tools.doctor.neural_engine import judge
from protocol.contracts.examination import RuntimeName
from protocol.contracts.neural_engine import record


def examined(
    draft: str | None,
    runtime: RuntimeName | None,
    *,
    on_progress: OnProgress = lambda _: None,
    on_stage: Callable[[str], None] = lambda _: None,
    examiner: Sequence[str] = EXAMINER,
    predicts: int = PREDICTS,
    patience: float | None = None,
) -> list[Finding]:
    """Findings on the draft model `draft` (None: the demo draft) on this machine's Neural Engine.

    `runtime`: None for what this machine has; "executor" rehearses the examination without a device.
    The verdict of a real one is kept, by the system's build, the chip and the package.
    """
    if runtime is None and sys.platform != "darwin":
        return [_none_here()]
    folder = converted_draft(draft, on_progress)
    place, chosen = place_of(folder), runtime or "coreml"
    limits = {} if patience is None else {"patience": patience}
    outcomes = examine(folder, chosen, examiner=examiner, predicts=predicts, on_stage=on_stage, **limits)
    findings, verdict = judge(outcomes, place, rehearsal=chosen == "executor")
    if chosen == "executor":
        return [*findings, Finding("verdict", "ok", "a rehearsal: nothing was found out about a Neural Engine")]
    file = record(verdict)
    if verdict.choice == "coreml":
        return [*findings, Finding("verdict", "ok", f"--draft-engine coreml uses Core ML here ({file})")]
    return [*findings, Finding("verdict", "warn", f"--draft-engine coreml drafts in MLX here ({file})")]


def _none_here() -> Finding:
    return Finding(
        "Neural Engine",
        "ok",
        "there is none: --draft-engine coreml runs the same package by an executor, which proves it and is no "
        "Neural Engine",
        "run this on a Mac, or rehearse it with --runtime executor",
    )
