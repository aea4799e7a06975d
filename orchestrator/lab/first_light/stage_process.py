"""The process of one stage, which may crash, hang, or be ended by Ctrl-C: both ends. Prints nothing.

`python -m orchestrator.lab.first_light.stage_process ORDER`: whatever it starts ends with it, and it with its parent.
"""

import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from orchestrator.api.validation import IneffectiveOption
from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light.report import StageReport
from orchestrator.lab.first_light.stages import STAGES, Asked, LightSettings, OnNotice, Stage
from orchestrator.machine.default_target import VARIABLE
from protocol.child_process import ChildProcess, Failed, claim_output, module_command
from protocol.errors import InputError, PipelineError
from protocol.worker.process import die_with_parent

PROGRAM = module_command("orchestrator.lab.first_light.stage_process")
_INTERRUPTED = 130
_ENDING_SECONDS = 10.0
"""In which an interrupted stage ends the processes that it started."""
_LOG_BYTES = 200_000
"""The end of a stage's output that is kept."""


class StageOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of a stage's process, in JSON."""

    stage: str
    settings: LightSettings
    life: int
    """A socket shared with the parent; its end of file means that the parent is gone."""


class StageNotice(msgspec.Struct, frozen=True, tag="notice", forbid_unknown_fields=True):
    """What the stage does now."""

    text: str


class Found(msgspec.Struct, frozen=True, tag="found", forbid_unknown_fields=True):
    """What the stage has found until now."""

    findings: Findings = Findings()
    whole: bool = False
    """It is done."""


StageMessage: TypeAlias = StageNotice | Found | Failed


def main() -> int:
    # A shell starts background commands with the interrupt ignored, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = msgspec.json.decode(sys.argv[1], type=StageOrder)
    answer: Callable[[StageMessage], None] = claim_output()
    end_with_parent(order.life)
    # A stage compares plain decoding with speculation, with the same keywords.
    warnings.simplefilter("ignore", IneffectiveOption)
    if order.settings.short:
        os.environ[VARIABLE] = "demo"
    try:
        asked = Asked(order.settings, lambda text: answer(StageNotice(text)), lambda found: answer(Found(found)))
        answer(Found(measurement(order.stage)(asked), whole=True))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the border: a stage that fails is a finding
        traceback.print_exc()
        words = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        answer(Failed(words, isinstance(error, InputError)))
    return 0


def measurement(name: str) -> Callable[[Asked], Findings]:
    """What carries out the stage `name`. It raises PipelineError with the reason if it can't."""
    module, _, function = next(stage.measure for stage in STAGES if stage.name == name).partition(".")
    return getattr(importlib.import_module(f"orchestrator.lab.first_light.{module}"), function)


def end_with_parent(life: int) -> None:
    """End like after Ctrl-C, cleaning up, when the parent is gone."""

    def end() -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # To that thread: a call that it waits in must end.
        signal.pthread_kill(main_thread, signal.SIGINT)
        time.sleep(_ENDING_SECONDS)
        os._exit(1)

    die_with_parent(life, end)


class RanStage(NamedTuple):
    report: StageReport
    log: str
    late: bool = False
    """Its time was up."""


def run_stage(
    stage: Stage,
    settings: LightSettings,
    seconds: float,
    notice: OnNotice = lambda _: None,
    *,
    program: Sequence[str] = PROGRAM,
) -> RanStage:
    """The report of one stage; it is ended after `seconds`. No failure is raised; KeyboardInterrupt ends it at once.

    `program`: a test's replacement for the process.
    """
    began = time.monotonic()
    found, reason, late = Found(), "", False
    life, theirs = socket.socketpair()
    with life, theirs:
        order = StageOrder(stage=stage.name, settings=settings, life=theirs.fileno())
        command = [*program, msgspec.json.encode(order).decode()]
        # Ctrl-C at the terminal reaches this process alone, which then ends the stage in order.
        with ChildProcess(command, inherited=[theirs.fileno()]) as process:
            try:
                while answer := process.report(StageMessage, began + seconds - time.monotonic()):
                    match answer:
                        case StageNotice(text):
                            notice(text)
                        case Found():
                            found = answer
                        case Failed(text):
                            reason = text
                    if found.whole or reason:
                        process.wait(_ENDING_SECONDS)
                        break
            except TimeoutError:
                late, reason = True, f"it was not done within {seconds / 60:.1f} minutes and was ended"
            finally:
                process.end(_ENDING_SECONDS, by=signal.SIGINT)
            if not found.whole:
                reason = reason or _ending(process.wait() or 0)
            report = StageReport(
                stage=stage.name,
                title=stage.title,
                status="done" if found.whole else "failed",
                reason=reason,
                seconds=round(time.monotonic() - began, 1),
                findings=found.findings,
            )
            return RanStage(report, process.words(_LOG_BYTES), late)


def _ending(code: int) -> str:
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
