"""A first light from start to end: which stages run, which are done already, and why others do not run."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from orchestrator.lab.first_light.folder import LightFolder
from orchestrator.lab.first_light.report import LightReport, StageReport, Status, page
from orchestrator.lab.first_light.stage_process import RanStage, run_stage
from orchestrator.lab.first_light.stages import (
    QUESTIONS,
    SECOND_PAIR,
    STAGES,
    LightSettings,
    Need,
    OnNotice,
    Question,
    Stage,
    StageScreen,
    has_neural_engine,
)
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.conditions import Conditions, conditions
from orchestrator.machine.memory.budget import usable
from orchestrator.machine.pairs.recommended_pairs import fits, pairs

Clock = Callable[[], float]
Lacking = Callable[[Stage, LightSettings], str]


def lacking(stage: Stage, settings: LightSettings) -> str:
    """What this machine lacks for the stage, as words behind "not here:"; empty if nothing."""
    if stage.name != "machine" and isinstance(device := machine_facts.mlx_device(), str):
        return f"MLX can't be used: {device}"
    return next(filter(None, (_lacking(need, settings) for need in stage.needs)), "")


def _lacking(need: Need, settings: LightSettings) -> str:
    if need == "GPU":
        return "" if machine_facts.computes_on_gpu() else "no GPU that MLX uses"
    if need == "Neural Engine":
        return "" if has_neural_engine() else "no Neural Engine with Core ML"
    if need == "coremltools":
        return "" if machine_facts.installed_version(need) else "coremltools is not installed"
    if need == "you":
        return ""
    if settings.short:
        return "the short form measures the demo pair alone"
    available = usable(machine_facts.memory_bytes(), machine_facts.gpu_working_set())
    enough = fits(pairs()[SECOND_PAIR], on_processor=False, available=available)
    return "" if enough else f"no memory for the pair {SECOND_PAIR}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user wants of a run. Unlike the settings, it changes no result."""

    minutes: float
    """In all; a stage that needs more than is left is skipped."""
    only: tuple[str, ...] = ()
    """Stages to run, also those that are done; none: all that are not."""
    skip: tuple[str, ...] = ()

    def leaves_out(self, stage: Stage) -> bool:
        return stage.name in self.skip or bool(self.only and stage.name not in self.only)


RunStage: TypeAlias = Callable[[Stage, LightSettings, float, OnNotice], RanStage]
"""`run_stage`, or a test's replacement."""


def run(
    folder: LightFolder,
    settings: LightSettings,
    choice: Choice,
    screen: StageScreen,
    *,
    stages: Iterable[Stage] = STAGES,
    run_one: RunStage = run_stage,
    lacks: Lacking = lacking,
    clock: Clock = time.monotonic,
    observe: Callable[[], Conditions] = conditions,
    questions: Sequence[Question] = QUESTIONS,
) -> LightReport:
    """Every stage in order. After each one the folder has its result and a whole report; KeyboardInterrupt passes.

    Stages that failed at an earlier start come last: they may hang again until the time is over.
    """
    began, ordered = clock(), list(stages)
    over = f"the {choice.minutes:g} minutes of this run were over"
    earlier, done = folder.results(), folder.done()
    results, failed = dict(earlier), earlier.keys() - done.keys()
    for stage in sorted(ordered, key=lambda stage: stage.name in failed):
        if stage.name not in done or stage.name in choice.only:
            left = 60 * choice.minutes - (clock() - began)
            absent = _hindered(stage, settings, choice, left, lacks)
            if absent is None:
                screen.began(stage, left)
                before = observe()
                ran = run_one(stage, settings, min(60 * stage.limit, left), screen.notice)
                report = msgspec.structs.replace(ran.report, before=before, after=observe())
                # Not the stage is to blame for the end of the run: the next start measures it.
                ended = ran.late and left < 60 * stage.limit
                results[stage.name] = _absent(stage, "skipped", over) if ended else folder.save(report, ran.log)
            elif absent.status == "not here":
                results[stage.name] = folder.save(absent, "")
            else:
                # Not saved: the next start may have the time.
                results.setdefault(stage.name, absent)
            write(folder, ordered, results, questions)
        known = results[stage.name] is earlier.get(stage.name)
        if known or not choice.leaves_out(stage):
            screen.ended(results[stage.name], known)
    return write(folder, ordered, results, questions)


def write(
    folder: LightFolder, stages: Iterable[Stage], results: Mapping[str, StageReport], questions: Iterable[Question]
) -> LightReport:
    """The report of the results so far, as it is in the folder now."""
    waiting = "its turn has not come"
    reports = [results.get(stage.name) or _absent(stage, "skipped", waiting) for stage in stages]
    report = folder.report(reports, questions)
    folder.write(report, page(report))
    return report


def _hindered(
    stage: Stage, settings: LightSettings, choice: Choice, seconds_left: float, lacks: Lacking
) -> StageReport | None:
    """The report of a stage that does not run now; None if it does."""
    if choice.leaves_out(stage):
        return _absent(stage, "skipped", "it was left out by --only or --skip")
    if "you" in stage.needs and stage.name not in choice.only:
        return _absent(stage, "not here", f"it needs you: first-light --only {stage.name} says what to do")
    if missing := lacks(stage, settings):
        return _absent(stage, "not here", missing)
    minutes = stage.estimate(settings)
    if 60 * minutes > seconds_left:
        left = f"it needs about {minutes:g} minutes, and {max(0.0, seconds_left) / 60:.1f} were left"
        return _absent(stage, "skipped", left)
    return None


def _absent(stage: Stage, status: Status, reason: str) -> StageReport:
    return StageReport(stage=stage.name, title=stage.title, status=status, reason=reason)
