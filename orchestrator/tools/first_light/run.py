"""A first light from start to end: which stages run, which are done already, and why others do not run."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from orchestrator.tools.first_light.findings import LightReport, StageReport, Status
from orchestrator.tools.first_light.folder import LightFolder
from orchestrator.tools.first_light.needs import lacking
from orchestrator.tools.first_light.page import page
from orchestrator.tools.first_light.settings import LightSettings
from orchestrator.tools.first_light.stage_runner import Observer, RanStage, run_stage
from orchestrator.tools.first_light.stages import STAGES, Stage

Clock = Callable[[], float]
Lacking = Callable[[Stage, LightSettings], str]


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


class Screen(Protocol):
    """Shows what goes on."""

    def began(self, stage: Stage, seconds_left: float) -> None: ...

    def observer(self, stage: Stage) -> Observer: ...

    def ended(self, report: StageReport, known: bool) -> None:
        """`known`: the result is of an earlier start."""
        ...


class RunStage(Protocol):
    """`run_stage`, or a test's replacement."""

    def __call__(self, stage: Stage, settings: LightSettings, seconds: float, observer: Observer, /) -> RanStage: ...


def run(
    folder: LightFolder,
    settings: LightSettings,
    choice: Choice,
    screen: Screen,
    *,
    stages: Iterable[Stage] = STAGES,
    run_one: RunStage = run_stage,
    lacks: Lacking = lacking,
    clock: Clock = time.monotonic,
) -> LightReport:
    """Every stage in order. After each one the folder has its result and a whole report; KeyboardInterrupt passes."""
    began, ordered = clock(), list(stages)
    results = dict(folder.done())
    for stage in ordered:
        known = results.get(stage.name)
        if known is not None and stage.name not in choice.only:
            screen.ended(known, True)
            continue
        left = 60 * choice.minutes - (clock() - began)
        reason = _unfit(stage, settings, choice, left)
        missing = "" if choice.leaves_out(stage) else lacks(stage, settings)
        if missing:
            results[stage.name] = folder.save(_absent(stage, "not here", missing), "")
        elif reason:
            # Not saved: the next start may have the time.
            results.setdefault(stage.name, _absent(stage, "skipped", reason))
        else:
            screen.began(stage, left)
            ran = run_one(stage, settings, min(60 * stage.limit, left), screen.observer(stage))
            if ran.late and left < 60 * stage.limit:
                # Not the stage is to blame: the next start measures it.
                results[stage.name] = _absent(stage, "skipped", f"the {choice.minutes:g} minutes of this run were over")
            else:
                results[stage.name] = folder.save(ran.report, ran.log)
        if not choice.leaves_out(stage):
            screen.ended(results[stage.name], False)
        write(folder, ordered, results)
    return write(folder, ordered, results)


def write(folder: LightFolder, stages: Iterable[Stage], results: Mapping[str, StageReport]) -> LightReport:
    """The report of the results so far, as it is in the folder now."""
    waiting = "its turn has not come"
    report = folder.report(results.get(stage.name) or _absent(stage, "skipped", waiting) for stage in stages)
    folder.write(report, page(report))
    return report


def _unfit(stage: Stage, settings: LightSettings, choice: Choice, seconds_left: float) -> str:
    """Why the stage does not run now; empty if it does."""
    if choice.leaves_out(stage):
        return "it was left out by --only or --skip"
    if 60 * stage.estimate(settings) > seconds_left:
        return f"it needs about {stage.estimate(settings):g} minutes, and {max(0.0, seconds_left) / 60:.1f} were left"
    return ""


def _absent(stage: Stage, status: Status, reason: str) -> StageReport:
    return StageReport(stage=stage.name, title=stage.title, status=status, reason=reason)
