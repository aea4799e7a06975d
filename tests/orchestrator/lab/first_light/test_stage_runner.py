"""Laws of a stage's process: whatever it does is a report, and nothing of it is left. Real processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from orchestrator.lab.findings import Value
from orchestrator.lab.first_light import stage_runner
from orchestrator.lab.first_light.stage_runner import Observer, RanStage, run_stage
from orchestrator.lab.first_light.stages import LightSettings, Stage

FAKE = (sys.executable, "-m", "tests.support.fake_stage")


def ran(name: str, seconds: float = 30.0, observer: Observer | None = None) -> RanStage:
    return run_stage(Stage(name, "", name, 1, 1), LightSettings(), seconds, observer or Observer(), program=FAKE)


def running() -> str:
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "command="], capture_output=True, text=True, check=True)
    return "\n".join(line for line in listing.stdout.splitlines() if "fake_stage" in line and "waits" in line)


def test_what_a_stage_finds_is_its_report_and_what_it_says_is_heard():
    heard: list[str] = []
    report = ran("good", observer=Observer(heard.append)).report

    assert report.status == "done"
    assert report.findings.values == (Value("seven", 7.0),)
    assert heard == ["good has begun"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crashes", "its process ended by signal 11"),
        ("quits", "its process ended with exit code 3"),
        ("fails", "the compiler has had enough"),
        ("babbles", "its process said what is no answer: b'Loading the model ...'"),
    ],
)
def test_a_stage_that_breaks_is_told_with_the_reason(name: str, reason: str):
    report = ran(name).report

    assert (report.status, report.reason) == ("failed", reason)


def test_what_a_stage_had_found_before_it_broke_is_kept():
    report = ran("fails late").report

    assert (report.status, report.findings.notes) == ("failed", ("one", "two"))


def test_a_stage_that_hangs_is_ended_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage_runner, "_ENDING_SECONDS", 0.2)
    began = time.monotonic()
    report = ran("hangs", seconds=0.5).report

    assert report.status == "failed"
    assert "not done within" in report.reason
    assert time.monotonic() - began < 20


def test_an_interrupt_ends_the_stage_at_once():
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()

    with pytest.raises(KeyboardInterrupt):
        ran("waits", observer=Observer(notice=lambda _: timer.start()))
    assert time.monotonic() - began < 20
    assert not running()


def test_a_stage_whose_parent_is_gone_ends_and_tidies_up():
    ours, theirs = socket.socketpair()
    program = (
        "import sys, time\n"
        "from orchestrator.lab.first_light.stage_process import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        "try:\n    print('waiting', flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('tidied')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    ours.close()
    output, _ = process.communicate(timeout=60)

    assert output == "tidied\n"
