"""Laws of services: each system's manager starts what the definition says, and nothing is left when it is removed."""

import plistlib
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.commands.service.definition import ServiceDefinition, ServiceManager
from orchestrator.cli.commands.service.launchd import LABEL, LaunchAgent
from orchestrator.cli.commands.service.systemd import NAME, SystemdUnit, unit
from protocol.errors import InputError, PipelineError
from tests.support.service_programs import fake_launchctl, fake_systemctl, told

DEFINITION = ServiceDefinition(
    program=("/opt/a b/launch-pipeline",),
    arguments=("serve", "--host", "127.0.0.1", "--port", "8080", "--draft", 'a "b" $HOME 100% \\'),
    folder="/home/me/100% mine",
    environment={"PATH": "/bin:/usr/bin", "HF_HOME": "/models $1"},
)


def _agent(folder: Path) -> tuple[ServiceManager, Path]:
    program = fake_launchctl(folder / "fake")
    return LaunchAgent(folder / "home", str(program), user=501, pause=lambda _: None), program


def _unit(folder: Path) -> tuple[ServiceManager, Path]:
    program = fake_systemctl(folder / "fake")
    return SystemdUnit(folder / "home" / ".config", str(program)), program


BOTH = pytest.mark.parametrize("make", [_agent, _unit])


@BOTH
def test_a_service_that_was_installed_runs_with_its_arguments(make, tmp_path: Path):
    manager, _ = make(tmp_path)

    manager.install(DEFINITION)

    state = manager.state()
    assert (state.installed, state.process, state.arguments) == (True, 4242, DEFINITION.arguments)
    assert Path(state.definition).is_file()


@BOTH
def test_nothing_is_left_of_a_service_that_was_removed(make, tmp_path: Path):
    manager, _ = make(tmp_path)
    manager.install(DEFINITION)
    log = Path(manager.state().log)
    if log.is_absolute():
        log.write_text("words")
        log.with_name("serve.log.1").write_text("old words")

    assert manager.remove()
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not log.exists()
    assert not (tmp_path / "fake" / "loaded").exists()
    assert manager.state().installed is False


@BOTH
def test_removing_what_is_not_there_is_no_error(make, tmp_path: Path):
    manager, _ = make(tmp_path)

    assert manager.remove() is False
    assert manager.state().installed is False


@BOTH
def test_a_second_service_replaces_the_first(make, tmp_path: Path):
    manager, _ = make(tmp_path)
    manager.install(DEFINITION)

    manager.install(replace(DEFINITION, arguments=("serve", "--host", "::1", "--port", "1")))

    assert manager.state().arguments == ("serve", "--host", "::1", "--port", "1")


@pytest.mark.parametrize(("make", "sign"), [(_agent, "no-domain"), (_unit, "no-bus")])
def test_without_a_session_the_next_step_is_said_and_nothing_written(make, sign: str, tmp_path: Path):
    manager, program = make(tmp_path)
    (program.parent / sign).touch()

    with pytest.raises(PipelineError, match=r"failed .*: a (LaunchAgent|user's service) needs"):
        manager.require_available()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("make", [LaunchAgent, SystemdUnit])
def test_a_system_without_the_program_says_so(make, tmp_path: Path):
    with pytest.raises(PipelineError, match=r"can't be started \(No such file"):
        make(tmp_path, str(tmp_path / "absent")).require_available()


def test_an_agent_is_loaded_once_the_old_one_has_gone(tmp_path: Path):
    manager, program = _agent(tmp_path)
    (program.parent / "busy").write_text("1\n2\n")

    manager.install(DEFINITION)

    assert manager.state().process == 4242
    assert [line.split()[0] for line in told(program)] == ["bootout", *["bootstrap"] * 3, "print"]


@pytest.mark.parametrize("seconds", [29, 31])
def test_an_old_agent_has_half_a_minute_to_end(tmp_path: Path, seconds: int):
    program = fake_launchctl(tmp_path / "fake")
    paused: list[float] = []
    manager = LaunchAgent(tmp_path / "home", str(program), user=501, pause=paused.append)
    (program.parent / "busy").write_text("busy\n" * seconds)

    with nullcontext() if seconds < 30 else pytest.raises(PipelineError, match=r"may still be ending.* install` again"):
        manager.install(DEFINITION)
    assert sum(paused) == min(seconds, 30)


def test_the_agent_is_interactive_starts_at_login_and_after_a_crash_and_keeps_its_log_small(tmp_path: Path):
    manager, _ = _agent(tmp_path)
    manager.install(DEFINITION)

    found = plistlib.loads(Path(manager.state().definition).read_bytes())

    assert Path(manager.state().definition).name == f"{LABEL}.plist"
    assert (found["ProcessType"], found["RunAtLoad"], found["KeepAlive"]) == (
        "Interactive",
        True,
        {"SuccessfulExit": False},
    )
    words = [*DEFINITION.program, "service", "run", "--log", manager.state().log, "--", *DEFINITION.arguments]
    assert found["ProgramArguments"] == words
    assert (found["EnvironmentVariables"], found["WorkingDirectory"]) == (DEFINITION.environment, DEFINITION.folder)
    assert not {"StandardOutPath", "StandardErrorPath"} & found.keys()


def test_the_unit_gives_systemd_the_very_words():
    lines = unit(DEFINITION).splitlines()
    command = next(line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart="))

    # shlex reads double quotes and backslashes as systemd does; $ and % are doubled for systemd.
    read = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(command)]
    assert read == [*DEFINITION.program, *DEFINITION.arguments]
    assert 'Environment="HF_HOME=/models $1"' in lines
    assert "WorkingDirectory=/home/me/100%% mine" in lines
    assert "Restart=on-failure" in lines
    assert "WantedBy=default.target" in lines


def test_a_line_break_can_not_add_lines_to_the_unit():
    with pytest.raises(InputError, match="line breaks"):
        unit(replace(DEFINITION, folder="/tmp\nExecStart=/bin/evil"))


def test_systemd_is_told_to_start_now_and_at_login(tmp_path: Path):
    manager, program = _unit(tmp_path)
    manager.install(DEFINITION)

    assert told(program) == ["daemon-reload", f"enable {NAME}", f"restart {NAME}"]
