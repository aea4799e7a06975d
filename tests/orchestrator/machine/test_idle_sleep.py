"""Laws of idle sleep: on a Mac one program holds it off exactly as long as the work lasts.

A stand-in for caffeinate writes its options and waits, as caffeinate does with -w.
"""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from orchestrator.cli.app import cli
from orchestrator.cli.configuration import commands
from orchestrator.cli.idle_sleep import without_idle_sleep
from tests.support.processes import until

_LONG = "attach, bench, calibrate, convert, doctor, first-light, profile"
_LONG += ", serve, serve-workers, start, target-rank"


@pytest.fixture
def caffeinate(tmp_path: Path) -> Path:
    program = tmp_path / "caffeinate"
    program.write_text(
        f"""#!/bin/sh
echo "$$ $*" >> "{tmp_path}/log.new"; mv "{tmp_path}/log.new" "{tmp_path}/log"
while kill -0 "$3" 2>/dev/null; do sleep 0.05; done
"""
    )
    program.chmod(0o755)
    return program


def _told(program: Path) -> list[str]:
    """Its process id and its options, once it runs."""
    log = program.parent / "log"
    until(log.exists)
    return log.read_text().split()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("failing", [False, True])
def test_idle_sleep_is_held_off_until_the_work_ends_or_fails(caffeinate: Path, failing: bool):
    with (
        pytest.raises(ZeroDivisionError) if failing else nullcontext(),
        without_idle_sleep("darwin", str(caffeinate)) as note,
    ):
        number, *options = _told(caffeinate)
        assert note == ""
        assert options == ["-i", "-w", str(os.getpid())]
        assert _runs(int(number))
        if failing:
            raise ZeroDivisionError

    assert not _runs(int(number))


def test_nothing_is_left_of_a_process_that_was_killed(caffeinate: Path):
    work = f"""
import time
from orchestrator.cli.idle_sleep import without_idle_sleep
from tests.support.processes import until
with without_idle_sleep("darwin", {str(caffeinate)!r}):
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", work])
    number = int(_told(caffeinate)[0])
    process.send_signal(signal.SIGKILL)
    process.wait()

    until(lambda: not _runs(number))
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("platform", "words"), [("darwin", "may fall asleep"), ("darwin", "No such file"), ("linux", "")]
)
def test_work_goes_on_without_the_program_and_other_systems_start_nothing(platform: str, words: str, tmp_path: Path):
    with without_idle_sleep(platform, str(tmp_path / "absent")) as note:
        assert words in note
        assert words or note == ""


@pytest.mark.parametrize("name", _LONG.split(", "))
def test_commands_that_take_long_keep_a_mac_awake(name: str):
    command = dict(commands(cli))[tuple(name.split())]

    assert getattr(command.callback, "stays_awake", False)
