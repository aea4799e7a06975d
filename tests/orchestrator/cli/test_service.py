"""Laws of `service`: options are checked before, keys stay private, and each system's manager runs what was asked."""

import json
import os
import plistlib
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import cli
from orchestrator.cli.commands.serve import serve, server_key
from orchestrator.cli.commands.service import command as module
from orchestrator.cli.commands.service.command import kept_environment, run_logged, start_command
from orchestrator.cli.commands.service.managers import (
    LABEL,
    LaunchAgent,
    ServiceDefinition,
    ServiceManager,
    SystemdUnit,
    unit,
)
from protocol.child_process import module_command
from protocol.errors import PipelineError
from tests.support.processes import until
from tests.support.service_programs import fake_launchctl, fake_systemctl, told


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Linux user with a home folder and a systemd of their own."""
    program = fake_systemctl(tmp_path / "fake")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "LAUNCH_PIPELINE_API_KEY", "LAUNCH_PIPELINE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module.service_manager, "__defaults__", ("linux",))
    return program


def _run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["service", *words], standalone_mode=False, catch_exceptions=True)


def _said(*words: str) -> dict:
    command, *rest = words
    result = _run(command, "--json", *rest)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.output)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """A configuration of the user's, which has this line for `serve`."""
    file = tmp_path / "settings.toml"
    file.write_text(f"[serve]\n{line}\n")
    monkeypatch.setenv("LAUNCH_PIPELINE_CONFIG", str(file))


def test_a_service_is_installed_told_of_and_removed(systemctl: Path, tmp_path: Path):
    assert _said("status")["installed"] is False

    state = _said("install", "--", "--port", "8123", "--pair", "demo")

    assert (state["running"], state["process"], state["address"]) == (True, 4242, "http://127.0.0.1:8123/v1")
    assert state["arguments"][-4:] == ["--port", "8123", "--pair", "demo"]
    assert _said("status") == state
    assert _said("remove") == {"removed": True}
    assert _files(tmp_path / "home") == []


def test_the_key_is_in_a_file_of_the_user_alone_and_nowhere_else(systemctl: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_PIPELINE_API_KEY", "secret-of-mine")

    state = _said("install")

    key = Path(state["key_file"])
    assert key.read_text() == "secret-of-mine\n"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert state["arguments"][-2:] == ["--api-key-file", str(key)]
    assert "secret-of-mine" not in Path(state["definition"]).read_text()


def test_a_key_that_clients_have_outlives_a_new_installation(systemctl: Path):
    first = Path(_said("install")["key_file"]).read_text()

    assert len(first) > 20
    assert Path(_said("install", "--", "--port", "9000")["key_file"]).read_text() == first


def test_a_key_of_the_configuration_stays_there(systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _configured(tmp_path, monkeypatch, 'api-key = "of-the-configuration"\nport = 8200')

    state = _said("install")

    assert state["arguments"][:3] == ["--config", str(tmp_path / "settings.toml"), "serve"]
    assert (state["key_file"], state["address"]) == ("", "http://127.0.0.1:8200/v1")


def _key_at_start(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, bool]:
    """What `serve` finds with a service's arguments and environment: its key, and whether it had to make one."""
    kept = kept_environment(os.environ)
    for name in [name for name in os.environ if name.startswith("LAUNCH_PIPELINE_") and name not in kept]:
        monkeypatch.delenv(name)
    found = []

    def started(api_key: str | None, api_key_file: Path | None, no_api_key: bool, host: str, **_: object) -> None:
        found.append(server_key(api_key, api_key_file, no_api_key, host))

    monkeypatch.setattr(serve, "callback", started)
    CliRunner().invoke(cli, arguments, standalone_mode=False, catch_exceptions=False)
    return found[0]


@pytest.fixture
def configured(systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Gives the user a variable, and a configuration with this line for `serve`, beside a file `key`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("key-in-a-file\n")

    def give(variable: str, value: str, line: str) -> None:
        _configured(tmp_path, monkeypatch, line)
        monkeypatch.setenv(f"LAUNCH_PIPELINE_{variable}", value)

    return give


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("NO_API_KEY", "1", ""), None),
        (("SERVE_NO_API_KEY", "1", ""), None),
        (("SERVE_API_KEY", "key-of-mine", ""), "key-of-mine"),
        (("API_KEY_FILE", "key", ""), "key-in-a-file"),
        (("API_KEY_FILE", "key", 'api-key-file = "another"'), "key-in-a-file"),
        (("DRAFT", "d", 'api-key-file = "key"'), "key-in-a-file"),
        (("DRAFT", "d", "no-api-key = true"), None),
    ],
)
def test_the_service_has_the_key_that_serve_would_have_in_the_terminal(
    configured: Callable[[str, str, str], None], monkeypatch: pytest.MonkeyPatch, given: Any, key: str | None
):
    configured(*given)

    assert _key_at_start(_said("install")["arguments"], monkeypatch) == (key, False)


NOTHING = ("DRAFT", "d", "")


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        *(
            (given, (), words)
            for given, words in (
                (("API_KEY", "key-of-mine", 'api-key = "of-mine-too"'), "LAUNCH_PIPELINE_API_KEY is set, and the con"),
                (("SERVE_API_KEY", "key-of-mine", 'api-key = "other"'), "LAUNCH_PIPELINE_SERVE_API_KEY is set"),
                (("NO_API_KEY", "false", "no-api-key = true"), "the configuration has no-api-key"),
                (("API_KEY", "short", ""), "at least 8 printable"),
                (("NO_API_KEY", "1", 'host = "0.0.0.0"'), "can be reached from other machines"),
            )
        ),
        (NOTHING, ("--api-key", "on-the-line"), "can't be one"),
        (NOTHING, ("--port", "0"), "a port that stays the same"),
        (NOTHING, ("--no-such-option",), "No such option"),
        (NOTHING, ("--draft", "a\nb"), "line breaks"),
        (NOTHING, ("--draft", "a\x1bb"), "control characters"),
        (NOTHING, ("--draft", "a\udcffb"), "bytes that are no text"),
    ],
)
def test_with_what_the_service_would_not_start_nothing_is_installed(
    configured: Callable[[str, str, str], None], tmp_path: Path, given: Any, options: tuple[str, ...], words: str
):
    configured(*given)
    result = _run("install", *(("--", *options) if options else ()))

    assert words in str(result.exception)
    assert _files(tmp_path / "home") == []


def test_a_folder_that_would_swallow_the_units_next_line_installs_nothing(
    systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder := tmp_path / "odd\\").mkdir()
    monkeypatch.chdir(folder)

    assert "no backslash at the folder's end" in str(_run("install").exception)
    assert _files(tmp_path / "home") == []


def test_the_start_command_is_what_the_user_started(tmp_path: Path):
    installed = tmp_path / "launch-pipeline"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)

    assert start_command(str(installed)) == (str(installed),)
    assert start_command("/checkout/bin/.start.py") == ("/checkout/bin/launch-pipeline",)
    assert start_command("/usr/bin/pytest") == module_command("orchestrator.cli.entry")


def test_keys_and_other_programs_variables_are_not_kept():
    variables = {"PATH": "/bin", "HF_TOKEN": "t", "LAUNCH_PIPELINE_API_KEY": "k", "LAUNCH_PIPELINE_SERVE_API_KEY": "k"}
    variables |= {"LAUNCH_PIPELINE_DRAFT": "d", "OTHER": "o"}

    assert kept_environment(variables) == {"PATH": "/bin", "LAUNCH_PIPELINE_DRAFT": "d"}


# Each system's manager ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("make", [_agent, _unit])
def test_a_service_runs_with_its_arguments_until_it_is_replaced_or_removed_without_a_trace(make, tmp_path: Path):
    manager, _ = make(tmp_path)
    assert (manager.remove(), manager.state().installed) == (False, False)

    manager.install(DEFINITION)
    state, log = manager.state(), Path(manager.state().log)
    assert (state.installed, state.process, state.arguments) == (True, 4242, DEFINITION.arguments)
    assert Path(state.definition).is_file()
    manager.install(replace(DEFINITION, arguments=("serve", "--host", "::1", "--port", "1")))
    assert manager.state().arguments == ("serve", "--host", "::1", "--port", "1")

    if log.is_absolute():
        log.write_text("words")
        log.with_name("serve.log.1").write_text("old words")
    assert manager.remove()
    assert _files(tmp_path / "home") == []
    assert not log.exists()
    assert not (tmp_path / "fake" / "loaded").exists()
    assert manager.state().installed is False


@pytest.mark.parametrize(("make", "sign"), [(_agent, "no-domain"), (_unit, "no-bus")])
def test_without_a_session_the_next_step_is_said_and_nothing_written(make, sign: str, tmp_path: Path):
    manager, program = make(tmp_path)
    (program.parent / sign).touch()

    with pytest.raises(PipelineError, match=r"failed .*: a (LaunchAgent|user's service) needs"):
        manager.require_available()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("make", [LaunchAgent, SystemdUnit])
def test_a_system_without_the_program_says_so_and_others_have_no_services(make, tmp_path: Path):
    with pytest.raises(PipelineError, match=r"can't be started \(No such file"):
        make(tmp_path, str(tmp_path / "absent")).require_available()
    with pytest.raises(PipelineError, match="no services on sunos5"):
        module.service_manager("sunos5")


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
    expected = ['Environment="HF_HOME=/models $1"', "WorkingDirectory=/home/me/100%% mine", "Restart=on-failure"]
    assert {*expected, "WantedBy=default.target"} <= {*lines}


# The log -----------------------------------------------------------------------------------------


def _program(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


def test_both_streams_are_in_the_log_with_the_time(tmp_path: Path):
    file = tmp_path / "logs" / "serve.log"

    code = run_logged(_program("import sys; print('Ready.'); print('Oh.', file=sys.stderr); sys.exit(3)"), file)

    lines = file.read_text().splitlines()
    assert code == 3
    assert [line.split(" ", 2)[2] for line in lines] == ["Ready.", "Oh.", "The service ended with exit code 3."]


def test_the_log_stays_small(tmp_path: Path):
    file = tmp_path / "serve.log"

    run_logged(_program("for i in range(1000): print(f'line {i}')"), file, size=2000, kept=2)

    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["serve.log", "serve.log.1", "serve.log.2"]
    assert all(each.stat().st_size <= 2000 for each in files)
    assert "exit code 0" in file.read_text()


@pytest.mark.parametrize(("code", "told"), [(2, 0), (1, 1), (0, 0)])
def test_a_mistake_in_the_input_is_not_tried_again(code: int, told: int, tmp_path: Path):
    assert run_logged(_program(f"raise SystemExit({code})"), tmp_path / "log") == told


def test_the_service_ends_with_its_starter(tmp_path: Path):
    """launchd ends only the process that it started, and waits for it."""
    file = tmp_path / "log"
    service = "import signal, time; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
    service += "try: print('up'); time.sleep(60)\nexcept KeyboardInterrupt: print('tidy'); raise SystemExit(130)"
    starter = f"""
import signal, sys
from pathlib import Path
from orchestrator.cli.commands.service.command import run_logged
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(run_logged([sys.executable, "-u", "-c", {service!r}], Path({str(file)!r})))
"""
    process = subprocess.Popen([sys.executable, "-c", starter])
    until(lambda: file.exists() and "up" in file.read_text())
    process.send_signal(signal.SIGTERM)

    assert process.wait(20) == 130
    assert "tidy" in file.read_text()
