"""The process of one stage: `python -m orchestrator.lab.first_light.stage_process ORDER`.

Standard output has one JSON object a line: notices, then the findings or the reason why there are none. Whatever it
starts ends with it, and it ends with its parent.
"""

import importlib
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from orchestrator.api.validation import IneffectiveOption
from orchestrator.lab.findings import Findings
from orchestrator.lab.first_light.stages import Asked, StageOrder, stage_named
from orchestrator.machine.default_target import VARIABLE
from protocol.child_process import claim_output
from protocol.errors import PipelineError
from protocol.worker.process import die_with_parent

_INTERRUPTED = 130
_ENDING_SECONDS = 10.0


class StageNotice(msgspec.Struct, frozen=True, tag="notice", forbid_unknown_fields=True):
    """What the stage does now."""

    text: str


class SoFar(msgspec.Struct, frozen=True, tag="so far", forbid_unknown_fields=True):
    """What the stage has found until now."""

    findings: Findings


class StageFindings(msgspec.Struct, frozen=True, tag="found", forbid_unknown_fields=True):
    """The stage is done."""

    findings: Findings


class StageBroken(msgspec.Struct, frozen=True, tag="broken", forbid_unknown_fields=True):
    """The stage has failed, for this reason."""

    text: str


Answer: TypeAlias = StageNotice | SoFar | StageFindings | StageBroken


def main() -> int:
    # A shell starts background commands with the interrupt ignored, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = msgspec.json.decode(sys.argv[1], type=StageOrder)
    answer: Callable[[Answer], None] = claim_output()
    end_with_parent(order.life)
    # A stage compares plain decoding with speculation, with the same keywords.
    warnings.simplefilter("ignore", IneffectiveOption)
    if order.settings.short:
        os.environ[VARIABLE] = "demo"
    try:
        asked = Asked(order.settings, lambda text: answer(StageNotice(text)), lambda found: answer(SoFar(found)))
        answer(StageFindings(measurement(order.stage)(asked)))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except PipelineError as error:
        traceback.print_exc()
        answer(StageBroken(str(error)))
    except Exception as error:  # noqa: BLE001 - the border: a stage that fails is a finding
        traceback.print_exc()
        answer(StageBroken(f"{type(error).__name__}: {error}"))
    return 0


def measurement(name: str) -> Callable[[Asked], Findings]:
    """What carries out the stage `name`. It raises PipelineError with the reason if it can't."""
    module, _, function = stage_named(name).measure.partition(".")
    return getattr(importlib.import_module(f"orchestrator.lab.first_light.measurements.{module}"), function)


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


if __name__ == "__main__":
    sys.exit(main())
