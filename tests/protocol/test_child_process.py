"""Laws of a child process: lines go both ways, silence and ends are told apart, and nothing of it is left."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.lab.forwards import ForwardOrder, ForwardReport, ForwardTimed
from protocol import child_process
from protocol.child_process import ChildProcess, reports
from protocol.errors import PipelineError
from protocol.processes import start_time
from tests.support.processes import until

ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"


def child(script: str, *, asked: bool = False) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", script], asked=asked)


def test_what_is_sent_comes_back_line_by_line_and_silence_is_not_the_end():
    with child(ECHO, asked=True) as process:
        assert process.read(Any, 0.05) == []
        with pytest.raises(TimeoutError):
            process.report(Any, 0.05)
        for number in range(3):
            process.send({"number": number})

        assert [process.report(Any, 20.0) for _ in range(3)] == [{"number": number} for number in range(3)]


def test_the_end_is_told_and_half_a_line_is_none():
    script = "import sys; sys.stdout.write('1\\n[2, '); sys.stderr.write('first\\nno memory\\n'); sys.exit(3)"
    with child(script) as process:
        assert process.report(int) == 1
        assert process.report(int) is None
        assert process.wait(20.0) == 3
        assert not process.running
        assert process.last_words == "no memory"


def test_only_whole_lines_of_long_words_are_kept():
    with child("import sys; sys.stderr.write('the folder of zquux/secret\\nthe last line\\n')") as process:
        process.wait(20.0)
        assert process.words(30) == "the last line\n"


def test_one_that_has_ended_can_not_be_asked_and_nothing_to_start_is_an_error(tmp_path: Path):
    with child("pass", asked=True) as process:
        process.wait(20.0)
        with pytest.raises(BrokenPipeError):
            process.send(1)
    with pytest.raises(FileNotFoundError):
        ChildProcess([str(tmp_path / "absent")])


def test_a_stubborn_one_is_killed_with_what_it_started(tmp_path: Path):
    script = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        "print(inner.pid, flush=True); time.sleep(60)"
    )
    with child(script) as process:
        pid = process.report(int, 20.0)
        process.end(0.1)
        assert process.wait() == -signal.SIGKILL

    assert pid is not None
    until(lambda: start_time(pid) is None)


def test_it_is_asked_to_end_once():
    script = (
        "import signal, sys; told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1)); print(0, flush=True)\n"
        "sys.stdin.readline(); print(len(told), flush=True)"
    )
    with child(script, asked=True) as process:
        assert process.report(int, 20.0) == 0
        process.terminate()
        process.terminate()
        process.send(0)
        assert process.report(int, 20.0) == 1


# A process that reports --------------------------------------------------------------------------


ORDER = ForwardOrder()


@pytest.mark.parametrize("line", ['{"type":"progr', "", "nonsense"])
def test_a_process_killed_in_the_middle_of_a_report_is_told_in_a_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = f"import sys; sys.stdout.write({line!r}); sys.stderr.write('out of memory')"
    monkeypatch.setattr(child_process, "module_command", lambda _: [sys.executable, "-c", script])

    with pytest.raises(PipelineError, match=r"The job ended unexpectedly; start it again.*out of memory"):
        list(reports("any", ORDER, ForwardReport, (ForwardTimed,), name="The job", grace=5.0))
