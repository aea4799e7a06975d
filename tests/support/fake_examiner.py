"""An examining process that knows its reports by heart, and crashes or hangs where the environment says so."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from protocol.contracts.coreml import (
    Agreed,
    Broken,
    ExaminationOrder,
    ExaminationReport,
    Loaded,
    Loading,
    Placed,
    Predicted,
    Timed,
    Written,
)

BEHAVIOUR = os.environ.get("FAKE_DEVICE", "honest")
LOADED = Path(os.environ.get("FAKE_LOADED", "/none"))
"""A file: once it is there, compiling has ended."""


def say(report: ExaminationReport) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


def predict(order: ExaminationOrder) -> None:
    if BEHAVIOUR == "compiling" and order.units == "CPU_AND_NE":
        say(Loading(8))
        # Not without its parent.
        while not LOADED.exists() and os.getppid() != 1:
            time.sleep(0.05)
    say(Loading(8))
    say(Loaded(8, 1.5))
    say(Agreed(8, 0.01, 30, 30))
    if order.units == "CPU_AND_NE":
        misbehave()
    elif BEHAVIOUR == "crashing on the processor":
        os.abort()
    say(Predicted(order.predicts, True))
    say(Timed(8, 7.0 if order.units == "CPU_AND_NE" else 30.0))


def misbehave() -> None:
    match BEHAVIOUR:
        case "crashing":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hanging":
            signal.pause()
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "full":
            say(Broken("OSError: No space left on device", lasting=False))
            sys.exit(1)
        case "raising":
            say(Broken("RuntimeError: the compiler has had enough"))
            sys.exit(1)


def main() -> None:
    order = msgspec.json.decode(sys.argv[-1], type=ExaminationOrder)
    match order.stage:
        case "golden":
            say(Written())
        case "predict":
            predict(order)
        case "plan" if BEHAVIOUR == "unplanned":
            os.abort()
        case "plan":
            say(Placed("width_8", 40, 40, 1.0, {}))


if __name__ == "__main__":
    main()
