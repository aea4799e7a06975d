"""A stage's process that finds what it knows by heart, and crashes or hangs where the stage's name says so."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from orchestrator.lab.findings import Answer, AttachedFile, Findings, Table, Value
from orchestrator.lab.first_light.stage_process import Found, StageMessage, StageNotice, StageOrder
from orchestrator.machine.check import Check
from protocol.child_process import Failed

SECRETS = Path(os.environ.get("FAKE_SECRETS", os.devnull))
"""A file with one text a line, all of which it tells everywhere."""


def answer(what: StageMessage) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


def telling(text: str) -> Findings:
    return Findings(
        values=(Value(text, 1.0, text),),
        tables=(Table(text, (text,), ((text,), (2.5,)), text),),
        checks=(Check(text, "warn", text, text),),
        answers=(Answer("told", text),),
        notes=(text,),
        attachments=(AttachedFile("extra.toml", f"text = {text!r}\n"),),
    )


def main() -> None:
    order = msgspec.json.decode(sys.argv[-1], type=StageOrder)
    answer(StageNotice(f"{order.stage} has begun"))
    match order.stage:
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(600)
        case "waits":
            time.sleep(600)
        case "fails late":
            answer(Found(Findings(notes=("one",))))
            answer(Found(Findings(notes=("one", "two"))))
            answer(Failed("the compiler has had enough", input_error=False))
        case "fails":
            answer(Failed("the compiler has had enough", input_error=False))
        case "quits":
            sys.exit(3)
        case "tells":
            text = SECRETS.read_text()
            print(text, file=sys.stderr)
            answer(StageNotice(text))
            answer(Found(telling(text), whole=True))
        case "fails telling":
            answer(Failed(SECRETS.read_text(), input_error=False))
        case _:
            answer(Found(Findings(values=(Value("seven", 7.0),)), whole=True))


if __name__ == "__main__":
    main()
