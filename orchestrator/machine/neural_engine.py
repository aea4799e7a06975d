"""Whether a converted draft can run on this machine's Neural Engine: the examination, its judgement, its verdict.

Each stage runs in a process that may crash or hang. Imports no Core ML, and knows no pipeline.
"""

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from orchestrator.machine.check import Check
from orchestrator.machine.hardware import is_quiet
from protocol.child_process import ChildProcess, module_command
from protocol.contracts.coreml import (
    Agreed,
    Broken,
    EngineVerdict,
    ExaminationOrder,
    ExaminationReport,
    ExaminedSystem,
    Loading,
    Placed,
    Predicted,
    RuntimeName,
    Stage,
    Timed,
    Units,
    recorded,
)

EXAMINER = module_command("draft_worker.coreml.examine")
PREDICTS = 300
_PREDICTS_ON_PROCESSOR = 60
"""Enough for a time to compare with the Neural Engine's."""
_DEATHS = 2
"""So many examinations that died in succession, each on a quiet machine, cost the package, and it alone. Memory may be
short, or the first predict of a package that was not compiled gets a SIGKILL (coremltools issue 2758)."""

OnStage: TypeAlias = Callable[[str], None]
"""Called with a description of what is being done."""


class Limits(NamedTuple):
    """Seconds."""

    silence: float = 300.0
    """Without a report for this time a stage hangs, unless something is being loaded."""
    loading: float = 3600.0
    """The most that one function may take to load. The Neural Engine's compiler has taken ten minutes for a large one
    (argmax-oss-swift, issue 309), without a word."""
    progress: float = 60.0
    """How often a load that goes on is told."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """The outcome of one stage."""

    stage: Stage
    units: Units
    reports: tuple[ExaminationReport, ...]
    ending: Literal["done", "broken", "crashed", "died", "hung"]
    """died: by a signal."""
    text: str = ""
    """The reason of a bad ending, without a subject."""
    lasting: bool = True
    """The process itself says that the model or the system is the cause of a bad ending."""
    beside: bool = False
    """The GPU was busy meanwhile: its times say what the draft costs there, and decide nothing."""

    def of(self, kind: type) -> list:
        """Reports of one kind."""
        return [report for report in self.reports if isinstance(report, kind)]


class Examination(NamedTuple):
    outcomes: list[StageOutcome]
    findings: list[Check]
    verdict: EngineVerdict


def examine(
    folder: Path,
    place: ExaminedSystem,
    runtime: RuntimeName = "coreml",
    *,
    examiner: Sequence[str] = EXAMINER,
    limits: Limits = LIMITS,
    predicts: int = PREDICTS,
    on_stage: OnStage = lambda _: None,
    busy: Callable[[], AbstractContextManager[object]] | None = None,
) -> Examination:
    """Of the converted draft in `folder`; without the executor's logits the later stages are skipped.

    `examiner` is the program that runs a stage. With `busy`, which keeps the GPU busy as long as its context lasts, the
    predicts on the Neural Engine are repeated beside that. `runtime` executor: a rehearsal, see `judge`.
    """
    outcomes: list[StageOutcome] = []
    rehearsal = runtime == "executor"
    quiet = rehearsal or is_quiet()
    with tempfile.TemporaryDirectory() as room:

        def run(words: str, stage: Stage, units: Units, count: int) -> StageOutcome:
            on_stage(words)
            golden = str(Path(room) / "golden.npz")
            order = ExaminationOrder(
                folder=str(folder), stage=stage, golden=golden, runtime=runtime, units=units, predicts=count
            )
            return _run(order, examiner, limits, on_stage)

        for each in _stages(predicts):
            outcomes.append(run(*each))
            if outcomes[0].ending != "done":
                break
        else:
            if busy is not None:
                with busy():
                    words = f"{predicts} predicts on the Neural Engine beside a busy GPU"
                    outcomes.append(replace(run(words, "predict", "CPU_AND_NE", predicts), beside=True))
    findings, verdict = judge(outcomes, place, rehearsal)
    choice, deaths, before = verdict.choice, 0, recorded(place)
    if not (rehearsal or (quiet and is_quiet())):
        choice = "unknown" if choice == "mlx" else choice
    elif choice == "unknown" and any(outcome.ending == "died" for outcome in filter(_decides, outcomes)):
        deaths = 1 + (0 if before is None else before.deaths)
        choice = "mlx" if deaths >= _DEATHS else choice
    return Examination(outcomes, findings, structs.replace(verdict, choice=choice, deaths=deaths))


def _stages(predicts: int) -> list[tuple[str, Stage, Units, int]]:
    few = min(predicts, _PREDICTS_ON_PROCESSOR)
    return [
        ("the executor's logits", "golden", "CPU_AND_NE", 0),
        (f"{predicts} predicts on the Neural Engine", "predict", "CPU_AND_NE", predicts),
        (f"{few} predicts on the processor", "predict", "CPU_ONLY", few),
        ("where Core ML would run what", "plan", "CPU_AND_NE", 0),
    ]


def _run(order: ExaminationOrder, examiner: Sequence[str], limits: Limits, on_stage: OnStage) -> StageOutcome:
    command = [*examiner, msgspec.json.encode(order).decode()]
    with ChildProcess(command, session=False) as process:
        try:
            reports, silence = _read(process, order.units, limits, on_stage)
        finally:
            process.end(by=signal.SIGKILL)
        code, last = process.wait() or 0, process.words().strip().splitlines()[-1:]
    outcome = StageOutcome(order.stage, order.units, reports, "done")
    broken = next((report for report in reports if isinstance(report, Broken)), None)
    if silence:
        return replace(outcome, ending="hung", text=silence, lasting=False)
    if broken is not None:
        return replace(outcome, ending="broken", text=broken.text, lasting=broken.lasting)
    if code:
        cause = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        ending = "died" if code < 0 else "crashed"
        return replace(outcome, ending=ending, text=" ".join([cause, *last]), lasting=False)
    return outcome


def _read(
    process: ChildProcess, units: Units, limits: Limits, on_stage: OnStage
) -> tuple[tuple[ExaminationReport, ...], str]:
    """All reports, and what is to be said of a process that did not end; empty if it did."""
    reports: tuple[ExaminationReport, ...] = ()
    heard = time.monotonic()
    while True:
        loading = _loading(reports[-1], units) if reports else ""
        limit = limits.loading if loading else limits.silence
        left = max(0.0, heard + limit - time.monotonic())
        found = process.read(ExaminationReport, min(left, limits.progress) if loading else left)
        silent = time.monotonic() - heard
        if found is None:
            ended = process.wait(limits.silence) is not None
            return reports, "" if ended else f"said nothing for {limits.silence:.0f} s"
        if found:
            reports, heard = (*reports, *found), time.monotonic()
        elif silent >= limit:
            if not loading:
                return reports, f"said nothing for {silent:.0f} s"
            return (
                reports,
                f"was ended after {silent / 60:.0f} min of {loading}; a package with fewer widths takes less",
            )
        elif loading:
            on_stage(f"{loading}, {silent / 60:.0f} min so far")


def _loading(last: ExaminationReport, units: Units) -> str:
    """What is being loaded; empty if nothing is."""
    if not isinstance(last, Loading):
        return ""
    what = "the package" if last.width is None else f"width {last.width}"
    return f"compiling {what} for the {'Neural Engine' if units == 'CPU_AND_NE' else 'processor'}"


# Judging: what came of the stages, and whether a draft may run there -----------------------------------

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
) -> tuple[list[Check], EngineVerdict]:
    """Findings in the order of the stages, and the verdict: any lasting failure decides against Core ML.

    It is unknown if stages failed only for reasons that may not come again. In a rehearsal our executor replaces the
    device, and times are ignored. What was measured beside a busy GPU is left out.
    """
    outcomes = [outcome for outcome in outcomes if not outcome.beside]
    found = [(finding, outcome) for outcome in outcomes for finding in _of_stage(outcome)]
    failures = [(finding, outcome.lasting) for finding, outcome in found if finding.status == "fail"]
    findings = [*(finding for finding, _ in found), *([] if rehearsal else _speed(outcomes))]
    if not failures:
        return findings, EngineVerdict(place=place, choice="coreml", reason="all that was examined is as it should be")
    failure, lasting = max(failures, key=itemgetter(1))
    choice, reason = "mlx" if lasting else "unknown", f"{failure.name}: {failure.text}"
    return findings, EngineVerdict(place=place, choice=choice, reason=reason)


def _decides(outcome: StageOutcome) -> bool:
    """Whether a failure of the stage counts. A plan is an estimate, and no draft runs on the processor."""
    return not outcome.beside and outcome.stage != "plan" and (outcome.stage, outcome.units) != ("predict", "CPU_ONLY")


def _of_stage(outcome: StageOutcome) -> list[Check]:
    warned = {} if _decides(outcome) else {"status": "warn", "next_step": None}
    return [structs.replace(each, **warned) if each.status == "fail" else each for each in _found(outcome)]


def _found(outcome: StageOutcome) -> list[Check]:
    name = {"golden": "executor", "plan": "compute plan"}.get(outcome.stage, _device(outcome))
    if outcome.ending != "done":
        return [Check(name, "fail", f"the examining process {_ending(outcome)}", _NEXT)]
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
    return [_compared(width, engine[width], processor[width]) for width in sorted(engine.keys() & processor.keys())]


def _compared(width: int, engine: float, processor: float) -> Check:
    text = f"width {width}: {engine:.2f} ms, {processor:.2f} ms on the processor alone"
    if processor > engine:
        return Check("latency", "ok", text)
    return Check("latency", "warn", f"{text}: the Neural Engine is not used, or no faster; a trial decides")


def _device(outcome: StageOutcome) -> str:
    return "Neural Engine" if outcome.units == "CPU_AND_NE" else "processor"
