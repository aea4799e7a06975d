"""`doctor --neural-engine`: examines a converted draft, and decides which engine the pipeline uses for it."""

import sys
from collections.abc import Sequence

from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.draft_choice import place_of
from orchestrator.machine.drafts.shipped_drafts import default_draft
from orchestrator.machine.finding import Finding
from orchestrator.machine.neural_engine.examination import EXAMINER, LIMITS, PREDICTS, Limits, OnStage, examine
from orchestrator.machine.neural_engine.judgement import judge
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.coreml.examination import RuntimeName
from protocol.contracts.coreml.neural_engine import record

_AGAIN = "run launch-pipeline doctor --neural-engine again"


def examined(
    draft: str | None,
    runtime: RuntimeName | None,
    *,
    on_progress: OnProgress = silent,
    on_stage: OnStage = lambda _: None,
    examiner: Sequence[str] = EXAMINER,
    predicts: int = PREDICTS,
    limits: Limits = LIMITS,
) -> list[Finding]:
    """Findings on the draft model `draft` (None: the default draft) on this machine's Neural Engine.

    `runtime`: None for what this machine has; "executor" rehearses it without a device.
    The verdict of a real examination is stored by system build, chip and package.
    """
    if runtime is None and sys.platform != "darwin":
        return [_none_here()]
    model, note = (draft, "") if draft is not None else _default(on_progress)
    folder = converted_draft(model, on_progress)
    place, chosen = place_of(folder), runtime or "coreml"
    outcomes = examine(folder, chosen, examiner=examiner, limits=limits, predicts=predicts, on_stage=on_stage)
    findings, verdict = judge(outcomes, place, rehearsal=chosen == "executor")
    findings = [*([Finding("draft", "warn", note)] if note else []), *findings]
    if chosen == "executor":
        return [*findings, Finding("verdict", "ok", "a rehearsal: nothing was found out about a Neural Engine")]
    if verdict is None:
        return [*findings, Finding("verdict", "warn", "none is recorded: the failure may not come again", _AGAIN)]
    file = record(verdict)
    if verdict.choice == "coreml":
        return [*findings, Finding("verdict", "ok", f"--draft-engine coreml uses Core ML here ({file})")]
    return [*findings, Finding("verdict", "warn", f"--draft-engine coreml drafts in MLX here ({file})")]


def _default(on_progress: OnProgress) -> tuple[str, str]:
    """The default draft, and why it is the demo draft if it is."""
    folder, note = default_draft(on_progress)
    return str(folder), note


def _none_here() -> Finding:
    return Finding(
        "Neural Engine",
        "ok",
        "there is none: --draft-engine coreml runs the same package by an executor, which proves it and is no "
        "Neural Engine",
        "run this on a Mac, or rehearse it with --runtime executor",
    )
