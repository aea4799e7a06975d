"""What an examination of the Neural Engine means: findings, and whether a draft may run there. Pure."""

from collections.abc import Sequence

from orchestrator.machine.check import Check
from orchestrator.machine.neural_engine.examination import StageOutcome
from protocol.contracts.coreml.examination import Agreed, Placed, Predicted, Timed
from protocol.contracts.coreml.neural_engine import EngineVerdict, ExaminedSystem

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


def judge(
    outcomes: Sequence[StageOutcome], place: ExaminedSystem, rehearsal: bool = False
) -> tuple[list[Check], EngineVerdict | None]:
    """Findings in the order of the stages, and the verdict: any lasting failure decides against Core ML.

    None: a stage failed for a reason that may not come again, so that nothing is known. In a rehearsal our executor
    replaces the device, and times are ignored.
    """
    found = [(finding, outcome.lasting) for outcome in outcomes for finding in _of_stage(outcome)]
    found += [] if rehearsal else [(finding, True) for finding in _speed(outcomes)]
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
            return [*(_agreement(name, each) for each in outcome.of(Agreed)), *_steadiness(name, outcome)]


def _ending(outcome: StageOutcome) -> str:
    return f"failed ({outcome.text})" if outcome.ending == "broken" else outcome.text


def _agreement(device: str, agreed: Agreed) -> Check:
    if agreed.deviation is None:
        return Check(f"{device}'s logits", "fail", f"width {agreed.width}: some are no numbers", _NEXT)
    text = (
        f"width {agreed.width}: logits deviate by {agreed.deviation:.3f} standard deviations, "
        f"{agreed.same:.0%} of the favourites are the executor's"
    )
    good = agreed.deviation <= _DEVIATION and agreed.same >= _SAME
    return Check(f"{device}'s logits", "ok" if good else "fail", text, None if good else _NEXT)


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


def _compared(width: int, engine: float, processor: float, *, decides: bool) -> Check:
    text = f"width {width}: {engine:.2f} ms, {processor:.2f} ms on the processor alone"
    if not decides or processor > _FASTER * engine:
        return Check("latency", "ok", text)
    return Check("latency", "fail", f"{text}: the Neural Engine is not used, or no faster", _NEXT)


def _device(outcome: StageOutcome) -> str:
    return "Neural Engine" if outcome.units == "CPU_AND_NE" else "processor"
