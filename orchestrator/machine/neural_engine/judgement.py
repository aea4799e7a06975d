"""What an examination of the Neural Engine means: findings, and whether a draft may run there. Pure."""

from collections.abc import Sequence

from orchestrator.machine.check import Check
from orchestrator.machine.neural_engine.examination import StageOutcome
from protocol.contracts.coreml import Agreed, EngineVerdict, ExaminedSystem, Placed, Predicted, Timed

_DEVIATION = 0.11
"""Limit for a device's logits, in standard deviations. 0.1 is allowed, and over few tokens may be measured as a little
more. Wrong positions or a shifted mask deviate by 0.4 and more, a wrong head by up to that: one that matters less
than 0.1 costs hardly an accepted token."""
_SAME = 0.9
"""Minimum share of clear favourites that are the executor's too, over all widths."""
_MIN_COST = 0.9
"""Below this share of the estimated cost on the Neural Engine, a warning is given."""
_NEXT = (
    "the pipeline drafts in MLX instead; launch-pipeline doctor --neural-engine --draft MODEL examines again, for "
    "example after an update"
)


def judge(
    outcomes: Sequence[StageOutcome], place: ExaminedSystem, rehearsal: bool = False
) -> tuple[list[Check], EngineVerdict | None]:
    """Findings in the order of the stages, and the verdict: any lasting failure decides against Core ML.

    None: a stage failed for a reason that may not come again, so that nothing is known. In a rehearsal our executor
    replaces the device, and times are ignored. What was measured beside a busy GPU is left out.
    """
    outcomes = [outcome for outcome in outcomes if not outcome.beside]
    found = [(finding, outcome.lasting) for outcome in outcomes for finding in _of_stage(outcome)]
    found += [] if rehearsal else [(finding, False) for finding in _speed(outcomes)]
    findings = [finding for finding, _ in found]
    failures = [(finding, lasting) for finding, lasting in found if finding.status == "fail"]
    lasting_failure = next((finding for finding, lasting in failures if lasting), None)
    if lasting_failure is not None:
        reason = f"{lasting_failure.name}: {lasting_failure.text}"
        return findings, EngineVerdict(place=place, choice="mlx", reason=reason)
    if failures:
        return findings, None
    return findings, EngineVerdict(place=place, choice="coreml", reason="all that was examined is as it should be")


def _of_stage(outcome: StageOutcome) -> list[Check]:
    name = {"golden": "executor", "plan": "compute plan"}.get(outcome.stage, _device(outcome))
    if outcome.ending != "done":
        # The plan is only an estimate: without it, the times still decide.
        status = "warn" if outcome.stage == "plan" else "fail"
        return [Check(name, status, f"the examining process {_ending(outcome)}", _NEXT if status == "fail" else None)]
    match outcome.stage:
        case "golden":
            return [Check(name, "ok", "reads the package and has logits to compare with")]
        case "plan":
            return [_placement(each) for each in outcome.of(Placed)]
        case "predict":
            agreed: list[Agreed] = outcome.of(Agreed)
            return [
                *(_deviation(name, each) for each in agreed),
                *_favourites(name, agreed),
                *_steadiness(name, outcome),
            ]


def _ending(outcome: StageOutcome) -> str:
    return f"failed ({outcome.text})" if outcome.ending == "broken" else outcome.text


def _deviation(device: str, agreed: Agreed) -> Check:
    if agreed.deviation is None:
        return Check(f"{device}'s logits", "fail", f"width {agreed.width}: some are no numbers", _NEXT)
    text = f"width {agreed.width}: logits deviate by {agreed.deviation:.3f} standard deviations"
    good = agreed.deviation <= _DEVIATION
    return Check(f"{device}'s logits", "ok" if good else "fail", text, None if good else _NEXT)


def _favourites(device: str, agreed: Sequence[Agreed]) -> list[Check]:
    """Of all widths together: at one of them there may be few clear favourites."""
    clear, same = sum(each.clear for each in agreed), sum(each.same for each in agreed)
    if not clear:
        return []
    text = f"{same} of {clear} clear favourites are the executor's"
    good = same >= _SAME * clear
    return [Check(f"{device}'s favourites", "ok" if good else "fail", text, None if good else _NEXT)]


def _steadiness(device: str, outcome: StageOutcome) -> list[Check]:
    predicted = outcome.of(Predicted)
    if not predicted:
        return [Check(f"{device}'s predicts", "fail", "the examining process made none", _NEXT)]
    last: Predicted = predicted[-1]
    if not last.steady:
        text = f"{last.done} predicts gave different logits for the same input"
        return [Check(f"{device}'s predicts", "fail", text, _NEXT)]
    return [Check(f"{device}'s predicts", "ok", f"{last.done} in a row, all alike")]


def _placement(placed: Placed) -> Check:
    if placed.operations == 0:
        # coremltools loads a plan without a function's name, so Core ML may tell of the default function only.
        return Check("compute plan", "warn", f"{placed.function}: Core ML does not tell where its operations run")
    text = f"{placed.function}: {placed.engine} of {placed.operations} operations, {placed.cost:.0%} of the cost"
    if placed.elsewhere:
        text += "; elsewhere " + ", ".join(f"{count} {kind}" for kind, count in list(placed.elsewhere.items())[:4])
    # A plan is an estimate, and never decides: the times do.
    return Check("compute plan", "ok" if placed.cost >= _MIN_COST else "warn", text)


def _speed(outcomes: Sequence[StageOutcome]) -> list[Check]:
    """Only the times show whether Core ML has silently moved everything to the processor. They decide nothing: a draft
    on the processor frees the GPU too, and the trial beside the target finds the faster one."""
    times = {
        outcome.units: {each.width: each.milliseconds for each in outcome.of(Timed)}
        for outcome in outcomes
        if outcome.stage == "predict" and outcome.ending == "done"
    }
    engine, processor = times.get("CPU_AND_NE", {}), times.get("CPU_ONLY", {})
    both = sorted(engine.keys() & processor.keys())
    if not both:
        return []
    return [_compared(width, engine[width], processor[width]) for width in both]


def _compared(width: int, engine: float, processor: float) -> Check:
    text = f"width {width}: {engine:.2f} ms, {processor:.2f} ms on the processor alone"
    if processor > engine:
        return Check("latency", "ok", text)
    return Check("latency", "warn", f"{text}: the Neural Engine is not used, or no faster; a trial decides")


def _device(outcome: StageOutcome) -> str:
    return "Neural Engine" if outcome.units == "CPU_AND_NE" else "processor"
