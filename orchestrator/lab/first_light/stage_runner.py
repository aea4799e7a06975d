"""Runs one stage in a process of its own, which may crash, hang, or be ended by Ctrl-C. Prints nothing."""

import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light.report import StageReport
from orchestrator.lab.first_light.stage_process import Answer, SoFar, StageBroken, StageFindings, StageNotice
from orchestrator.lab.first_light.stages import LightSettings, Stage, StageOrder
from protocol.child_process import ChildProcess, module_command

PROGRAM = module_command("orchestrator.lab.first_light.stage_process")
_ENDING_SECONDS = 10.0
"""In which an interrupted stage ends the processes that it started."""
_TICK_SECONDS = 0.5
_LOG_BYTES = 200_000
"""The end of a stage's output that is kept."""


class RanStage(NamedTuple):
    report: StageReport
    log: str
    late: bool = False
    """Its time was up."""


class _Heard(NamedTuple):
    """What a stage's process said."""

    answer: StageFindings | StageBroken | None
    """Its last word; None if it had none."""
    so_far: Findings
    late: bool = False


class Observer(NamedTuple):
    """Called with what a stage does now, and several times a second with the seconds so far."""

    notice: Callable[[str], None] = lambda _: None
    tick: Callable[[float], None] = lambda _: None


_UNOBSERVED = Observer()


def run_stage(
    stage: Stage,
    settings: LightSettings,
    seconds: float,
    observer: Observer = _UNOBSERVED,
    *,
    program: Sequence[str] = PROGRAM,
) -> RanStage:
    """The report of one stage; it is ended after `seconds`. No failure is raised; KeyboardInterrupt ends it at once.

    `program`: a test's replacement for the process.
    """
    began = time.monotonic()
    life, theirs = socket.socketpair()
    with life, theirs:
        order = StageOrder(stage=stage.name, settings=settings, life=theirs.fileno())
        command = [*program, msgspec.json.encode(order).decode()]
        # Ctrl-C at the terminal reaches this process alone, which then ends the stage in order.
        with ChildProcess(command, inherited=[theirs.fileno()]) as process:
            try:
                heard = _read(process, began, seconds, observer)
                if heard.answer is not None:
                    process.wait(_ENDING_SECONDS)
            finally:
                process.end(_ENDING_SECONDS, by=signal.SIGINT)
            found = _report(stage, heard, process.wait() or 0, seconds)
            report = msgspec.structs.replace(found, seconds=round(time.monotonic() - began, 1))
            return RanStage(report, process.words(_LOG_BYTES), heard.late)


def _report(stage: Stage, heard: _Heard, code: int, seconds: float) -> StageReport:
    if isinstance(heard.answer, StageFindings):
        return StageReport(stage=stage.name, title=stage.title, status="done", findings=heard.answer.findings)
    if isinstance(heard.answer, StageBroken):
        reason = heard.answer.text
    elif heard.late:
        reason = f"it was not done within {seconds / 60:.1f} minutes and was ended"
    else:
        reason = f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return StageReport(stage=stage.name, title=stage.title, status="failed", reason=reason, findings=heard.so_far)


def _read(process: ChildProcess, began: float, seconds: float, observer: Observer) -> _Heard:
    """Until the stage's last word, its end, or the end of its time."""
    found = Findings()
    while (passed := time.monotonic() - began) < seconds:
        observer.tick(passed)
        answers = process.read(Answer, _TICK_SECONDS)
        if answers is None:
            return _Heard(None, found)
        for answer in answers:
            match answer:
                case StageNotice(text):
                    observer.notice(text)
                case SoFar(found):
                    pass
                case StageFindings() | StageBroken():
                    return _Heard(answer, found)
    return _Heard(None, found, late=True)
