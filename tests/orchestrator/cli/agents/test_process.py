"""Laws of a program in the foreground: its exit code is ours, its files are private and go, signals are its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.commands.launch.command import run_program, with_settings
from orchestrator.cli.commands.launch.invocation import AgentProgram, AskedServer, Invocation
from protocol.errors import PipelineError

SERVER = AskedServer(address="http://127.0.0.1:1234", key="a-key", model="m")


def _run(script: str, *arguments: str, files: dict[str, str] | None = None) -> int:
    def settings(server: AskedServer, folder: Path) -> Invocation:
        options = ("-c", script, str(folder), server.key)
        return Invocation(options=options, environment={"GIVEN": "1", "REMOVED": None}, files=files or {})

    program = AgentProgram(command="python", install="", settings=settings)
    return run_program(sys.executable, program, SERVER, arguments)


def test_options_come_first_files_are_private_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REMOVED", "1")
    script = (
        "import os, pathlib, stat, sys; folder, key, out, *rest = sys.argv[1:]; file = pathlib.Path(folder) / 'f';"
        "pathlib.Path(out).write_text(repr((folder, key, rest, file.read_text(), stat.S_IMODE(file.stat().st_mode),"
        "os.environ.get('GIVEN'), os.environ.get('REMOVED'))))"
    )

    code = _run(script, str(tmp_path / "out"), "exec", "--json", files={"f": "content"})

    folder, *told = eval((tmp_path / "out").read_text())
    assert told == ["a-key", ["exec", "--json"], "content", 0o600, "1", None]
    assert (code, Path(folder).exists()) == (0, False)


@pytest.mark.parametrize(("own", "code"), [(None, 7), ("9", 9)])
def test_defaults_give_way_to_the_users_variables(own: str | None, code: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CODE", raising=False)
    if own is not None:
        monkeypatch.setenv("CODE", own)
    program = AgentProgram(command="", install="", settings=lambda *_: Invocation(defaults={"CODE": "7"}))

    assert run_program(sys.executable, program, SERVER, ("-c", "import os; os._exit(int(os.environ['CODE']))")) == code


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_programs(script: str, code: int):
    assert _run(script) == code


def test_what_is_no_program_is_told(tmp_path: Path):
    (tmp_path / "broken").write_text("")
    program = AgentProgram(command="broken", install="", settings=lambda *_: Invocation())

    with pytest.raises(PipelineError, match="can't be started"):
        run_program(str(tmp_path / "broken"), program, SERVER, ())


WAITER = """
import os, signal, sys
from orchestrator.cli.commands.launch.invocation import AgentProgram, Invocation, AskedServer
from orchestrator.cli.commands.launch.command import run_program
script = '''
import os, signal, sys, time
# `print` may be at work when the signal comes, and can't be called again then.
signal.signal(signal.{kind}, lambda *_: (os.write(1, b"heard\\\\n"), sys.exit(5)))
os.write(1, b"begun\\\\n")
time.sleep(60)
'''
program = AgentProgram(command="p", install="", settings=lambda *_: Invocation(options=("-c", script)))
server = AskedServer(address="http://h:1", key="k", model="m")
sys.exit(run_program(sys.executable, program, server, ()))
"""


@pytest.mark.parametrize(("kind", "to_group"), [("SIGINT", True), ("SIGTERM", False)])
def test_ctrl_c_and_a_request_to_end_reach_the_program_and_only_it_decides(kind: str, to_group: bool):
    with subprocess.Popen(
        [sys.executable, "-c", WAITER.replace("{kind}", kind)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "begun\n"
        number = signal.Signals[kind]
        # The terminal sends Ctrl-C to the whole group.
        os.killpg(starter.pid, number) if to_group else os.kill(starter.pid, number)
        assert starter.stdout.read() == "heard\n"

    assert starter.returncode == 5


def test_a_proxy_is_not_asked_for_the_server():
    plain = with_settings({"A": "1"}, {}, "http://127.0.0.1:1")
    behind = with_settings({"HTTP_PROXY": "http://p", "no_proxy": "x"}, {}, "http://127.0.0.1:1")

    assert plain == {"A": "1"}
    assert (behind["no_proxy"], behind["NO_PROXY"]) == ("x,127.0.0.1",) * 2
