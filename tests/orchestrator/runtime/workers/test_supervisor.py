"""Laws of ending a worker: SIGTERM before SIGKILL, without blocking the main loop. Real processes."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.core.options import Options
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor
from tests.support.processes import until

STUBBORN = """
import os, signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
for kind in (signal.SIGTERM, signal.SIGCONT):
    signal.signal(kind, lambda number, _: log.write(signal.Signals(number).name + "\\n"))
if "aloof" in sys.argv:
    os.closerange(3, log.fileno()); os.closerange(log.fileno() + 1, 256)
log.write("ready\\n")
while True:
    time.sleep(60)
"""


class Stage:
    """A supervisor whose draft does not want to end, and the list of what that draft was asked."""

    def __init__(self, folder: Path, *manners: str) -> None:
        self._log = folder / "signals"
        command = (sys.executable, "-c", STUBBORN, str(self._log), *manners)
        setup = OrchestratorSetup(session=str(folder), address="", target="", draft="", draft_command=command)
        self.supervisor = Supervisor(setup, Session(folder), 1, {})
        self.child = self.supervisor.start("draft")
        until(lambda: "ready" in self.heard())

    def heard(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(tmp_path, *getattr(request, "param", ()))
    yield stage
    stage.child.process.kill()
    stage.child.process.wait()


def test_a_silent_worker_is_asked_to_end_before_it_is_killed(stage: Stage):
    began = time.monotonic()
    stage.supervisor.kill("draft")
    stage.supervisor.kill("draft")

    until(lambda: "SIGTERM" in stage.heard())
    assert stage.heard().count("SIGTERM") == 1
    due = stage.supervisor.deadline()
    assert due is not None
    assert due >= began + 1.0
    stage.supervisor.restart_due(due - 0.01)
    assert stage.child.process.poll() is None

    stage.supervisor.restart_due(due)
    assert stage.child.process.wait(10) == -signal.SIGKILL
    assert stage.supervisor.reap("draft", due).startswith("ended by signal 9.")


def test_a_stopped_worker_is_woken_to_hear_that_it_should_end(stage: Stage):
    stage.child.process.send_signal(signal.SIGSTOP)

    stage.supervisor.kill("draft")

    until(lambda: "SIGCONT" in stage.heard())
    assert stage.heard().count("SIGTERM") == 1


@pytest.mark.parametrize("succeeded", [False, True])
def test_a_worker_that_is_no_longer_needed_is_asked_to_end_and_not_started_again(stage: Stage, succeeded: bool):
    """Unless its seat is wanted again before it has ended."""
    stage.supervisor.retire("draft")
    stage.child.succeeded = succeeded
    until(lambda: "SIGTERM" in stage.heard())
    stage.child.process.kill()
    child = stage.child
    stage.supervisor.reap("draft", 10.0)

    assert child.retired
    assert stage.supervisor.restarting("draft") == succeeded
    stage.supervisor.forget("draft")


@pytest.mark.thorough
def test_the_end_of_all_begins_with_a_request(stage: Stage):
    """Which takes longer where what is read of a prompt is kept."""
    stage.supervisor._setup = replace(stage.supervisor._setup, options=Options(disk_cache=1.0))
    began = time.monotonic()
    stage.supervisor.stop((stage.child.incarnation,))

    assert time.monotonic() - began >= 7.0
    assert "SIGTERM" in stage.heard()
    assert stage.child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("stage", [("aloof",)], indirect=True)
def test_a_worker_that_lets_go_of_its_parent_is_not_waited_for(stage: Stage):
    """Its life socket has ended, it has not: everybody else would wait."""
    cause = stage.supervisor.reap("draft", time.monotonic())

    assert stage.child.process.poll() is None
    assert cause.startswith("closed its connection")
    until(lambda: "SIGTERM" in stage.heard())
    stage.supervisor.forget("draft")
    due = stage.supervisor.deadline()
    assert due is not None
    stage.supervisor.restart_due(due)
    assert stage.child.process.wait(10) == -signal.SIGKILL
    stage.supervisor.restart_due(due)
    assert stage.supervisor.deadline() is None
