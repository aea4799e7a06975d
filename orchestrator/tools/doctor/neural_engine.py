"""`doctor --neural-engine`: examines a converted draft, and decides which engine the pipeline uses for it."""

import sys
from collections.abc import Callable, Sequence

from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.draft_choice import place_of
from orchestrator.machine.drafts.shipped_drafts import default_draft
from orchestrator.machine.progress import OnProgress, silent
from orchestrator.tools.doctor.examination import EXAMINER, PREDICTS, StageOutcome, examine
from orchestrator.tools.doctor.finding import Finding
from protocol.contracts.examination import Agreed, Placed, Predicted, RuntimeName, Timed
from protocol.contracts.neural_engine import EngineVerdict, ExaminedSystem, record

_DEVIATION = 0.1
"""Limit for a device's logits, in standard deviations: fp16 sums in another order stay below it."""
_SAME = 0.9
"""Minimum share of positions with the executor's top token."""
_FASTER = 1.1
"""Minimum speed-up over the processor at the draft's usual width; below it the Neural Engine is not in use."""
_USUAL_WIDTH = 8
_MIN_COST = 0.9
"""Below this share of the estimated cost on the Neural Engine, a warning is given."""
_NEXT = "the pipeline drafts in MLX instead; try again after an update of macOS, or convert with other options"


def examined(
    draft: str | None,
    runtime: RuntimeName | None,
    *,
    on_progress: OnProgress = silent,
    on_stage: Callable[[str], None] = lambda _: None,
    examiner: Sequence[str] = EXAMINER,
    predicts: int = PREDICTS,
    patience: float | None = None,
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
    limits = {} if patience is None else {"patience": patience}
    outcomes = examine(folder, chosen, examiner=examiner, predicts=predicts, on_stage=on_stage, **limits)
    findings, verdict = judge(outcomes, place, rehearsal=chosen == "executor")
    findings = [*([Finding("draft", "warn", note)] if note else []), *findings]
    if chosen == "executor":
        return [*findings, Finding("verdict", "ok", "a rehearsal: nothing was found out about a Neural Engine")]
    file = record(verdict)
    if verdict.choice == "coreml":
        return [*findings, Finding("verdict", "ok", f"--draft-engine coreml uses Core ML here ({file})")]
    return [*findings, Finding("verdict", "warn", f"--draft-engine coreml drafts in MLX here ({file})")]


def judge(
    outcomes: Sequence[StageOutcome], place: ExaminedSystem, rehearsal: bool = False
) -> tuple[list[Finding], EngineVerdict]:
    """Findings in the order of the stages, and the verdict: any failure decides against Core ML.

    In a rehearsal our executor replaces the device, and times are ignored.
    """
    findings = [finding for outcome in outcomes for finding in _of_stage(outcome)]
    findings += [] if rehearsal else _speed(outcomes)
    failure = next((finding for finding in findings if finding.status == "fail"), None)
    if failure is not None:
        return findings, EngineVerdict(place=place, choice="mlx", reason=f"{failure.name}: {failure.text}")
    return findings, EngineVerdict(place=place, choice="coreml", reason="all that was examined is as it should be")


def _default(on_progress: OnProgress) -> tuple[str, str]:
    """The default draft, and why it is the demo draft if it is."""
    folder, note = default_draft(on_progress)
    return str(folder), note


def _of_stage(outcome: StageOutcome) -> list[Finding]:
    name = {"golden": "executor", "plan": "compute plan"}.get(outcome.stage, _device(outcome))
    if outcome.ending != "done":
        # The plan is only an estimate: without it, the times still decide.
        status = "warn" if outcome.stage == "plan" else "fail"
        return [Finding(name, status, f"the examining process {_ending(outcome)}", _NEXT if status == "fail" else None)]
    match outcome.stage:
        case "golden":
            return [Finding(name, "ok", "reads the package and has logits to compare with")]
        case "plan":
            return [_placement(each) for each in outcome.of(Placed)]
        case "predict":
            return [*(_agreement(name, each) for each in outcome.of(Agreed)), *_steadiness(name, outcome)]


def _ending(outcome: StageOutcome) -> str:
    return f"failed ({outcome.text})" if outcome.ending == "broken" else outcome.text


def _agreement(device: str, agreed: Agreed) -> Finding:
    if agreed.deviation is None:
        return Finding(f"{device}'s logits", "fail", f"width {agreed.width}: some are no numbers", _NEXT)
    text = (
        f"width {agreed.width}: logits deviate by {agreed.deviation:.3f} standard deviations, "
        f"{agreed.same:.0%} of the favourites are the executor's"
    )
    good = agreed.deviation <= _DEVIATION and agreed.same >= _SAME
    return Finding(f"{device}'s logits", "ok" if good else "fail", text, None if good else _NEXT)


def _steadiness(device: str, outcome: StageOutcome) -> list[Finding]:
    predicted = outcome.of(Predicted)
    if not predicted:
        return [Finding(f"{device}'s predicts", "fail", "the examining process made none", _NEXT)]
    last: Predicted = predicted[-1]
    if not last.steady:
        text = f"{last.done} predicts gave different logits for the same input"
        return [Finding(f"{device}'s predicts", "fail", text, _NEXT)]
    return [Finding(f"{device}'s predicts", "ok", f"{last.done} in a row, all alike")]


def _placement(placed: Placed) -> Finding:
    text = f"{placed.function}: {placed.engine} of {placed.operations} operations, {placed.cost:.0%} of the cost"
    if placed.elsewhere:
        text += "; elsewhere " + ", ".join(f"{count} {kind}" for kind, count in list(placed.elsewhere.items())[:4])
    if placed.engine == 0:
        return Finding("compute plan", "fail", text, _NEXT)
    return Finding("compute plan", "ok" if placed.cost >= _MIN_COST else "warn", text)


def _speed(outcomes: Sequence[StageOutcome]) -> list[Finding]:
    """Only the times show whether Core ML has silently moved everything to the processor."""
    times = {
        outcome.units: {each.width: each.milliseconds for each in outcome.of(Timed)}
        for outcome in outcomes
        if outcome.stage == "predict" and outcome.ending == "done"
    }
    engine, processor = times.get("CPU_AND_NE", {}), times.get("CPU_ONLY", {})
    both = sorted(engine.keys() & processor.keys())
    if not both:
        return []
    usual = min(both, key=lambda width: abs(width - _USUAL_WIDTH))
    return [_compared(width, engine[width], processor[width], decides=width == usual) for width in both]


def _compared(width: int, engine: float, processor: float, *, decides: bool) -> Finding:
    text = f"width {width}: {engine:.2f} ms, {processor:.2f} ms on the processor alone"
    if not decides or processor > _FASTER * engine:
        return Finding("latency", "ok", text)
    return Finding("latency", "fail", f"{text}: the Neural Engine is not used, or no faster", _NEXT)


def _device(outcome: StageOutcome) -> str:
    return "Neural Engine" if outcome.units == "CPU_AND_NE" else "processor"


def _none_here() -> Finding:
    return Finding(
        "Neural Engine",
        "ok",
        "there is none: --draft-engine coreml runs the same package by an executor, which proves it and is no "
        "Neural Engine",
        "run this on a Mac, or rehearse it with --runtime executor",
    )
