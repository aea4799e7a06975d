"""Laws of `launch-pipeline service`: options are checked before, keys stay private, and status tells how to use it."""

import json
import os
import plistlib
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import cli
from orchestrator.cli.commands.serve import serve
from orchestrator.cli.commands.service import command as module
from orchestrator.cli.commands.service.command import kept_environment, protected_folder, start_command
from orchestrator.cli.commands.service.launchd import LaunchAgent
from orchestrator.cli.serving.server_key import server_key
from protocol.errors import InputError, PipelineError
from protocol.own_modules import module_command
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


@pytest.mark.parametrize(
    ("variable", "value", "line", "key"),
    [
        ("NO_API_KEY", "1", "", None),
        ("SERVE_NO_API_KEY", "1", "", None),
        ("SERVE_API_KEY", "key-of-mine", "", "key-of-mine"),
        ("API_KEY_FILE", "key", "", "key-in-a-file"),
        ("API_KEY_FILE", "key", 'api-key-file = "another"', "key-in-a-file"),
        ("DRAFT", "d", 'api-key-file = "key"', "key-in-a-file"),
        ("DRAFT", "d", "no-api-key = true", None),
    ],
)
def test_the_service_has_the_key_that_serve_would_have_in_the_terminal(
    systemctl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    line: str,
    key: str | None,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("key-in-a-file\n")
    _configured(tmp_path, monkeypatch, line)
    monkeypatch.setenv(f"LAUNCH_PIPELINE_{variable}", value)

    assert _key_at_start(_said("install")["arguments"], monkeypatch) == (key, False)


@pytest.mark.parametrize(
    ("variable", "value", "line", "words"),
    [
        ("API_KEY", "key-of-mine", 'api-key = "of-the-configuration"', "LAUNCH_PIPELINE_API_KEY is set, and the conf"),
        ("SERVE_API_KEY", "key-of-mine", 'api-key = "of-the-configuration"', "LAUNCH_PIPELINE_SERVE_API_KEY is set"),
        ("NO_API_KEY", "false", "no-api-key = true", "the configuration has no-api-key"),
        ("API_KEY", "key-of-mine", 'api-key-file = "key"', "exclude each other: leave one out"),
        ("API_KEY", "key-of-mine", "no-api-key = true", "exclude each other: leave one out"),
        ("API_KEY", "short", "", "at least 8 printable"),
        ("DRAFT", "d", 'api-key = "short"', "at least 8 printable"),
        ("API_KEY_FILE", "absent", "", "can't be read"),
        ("NO_API_KEY", "1", 'host = "0.0.0.0"', "can be reached from other machines"),
    ],
)
def test_a_key_with_which_the_service_would_not_start_installs_nothing(
    systemctl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    line: str,
    words: str,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("key-in-a-file\n")
    _configured(tmp_path, monkeypatch, line)
    monkeypatch.setenv(f"LAUNCH_PIPELINE_{variable}", value)

    result = _run("install")

    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)
    assert _files(tmp_path / "home") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key", "on-the-line"], "can't be one"),
        (["--port", "0"], "a port that stays the same"),
        (["--no-such-option"], "No such option"),
        (["--draft", "a\nb"], "line breaks"),
    ],
)
def test_options_that_a_service_can_not_have_install_nothing(
    systemctl: Path, tmp_path: Path, options: list[str], words: str
):
    result = _run("install", "--", *options)

    assert words in str(result.exception)
    assert _files(tmp_path / "home") == []


def test_without_a_session_nothing_is_written(systemctl: Path, tmp_path: Path):
    (systemctl.parent / "no-bus").touch()

    assert isinstance(_run("install").exception, PipelineError)
    assert _files(tmp_path / "home") == []


def test_on_a_mac_a_launch_agent_is_loaded(systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = fake_launchctl(tmp_path / "mac")
    agent = LaunchAgent(tmp_path / "home", str(program), user=501)
    monkeypatch.setattr(module, "service_manager", lambda: agent)

    state = _said("install", "--", "--port", "8123")

    assert told(program)[-2].startswith("bootstrap gui/501 ")
    assert plistlib.loads((tmp_path / "mac" / "loaded").read_bytes())["ProgramArguments"][-2:] == ["--port", "8123"]
    assert state["log"].endswith("Library/Logs/launch-pipeline/serve.log")
    assert _said("remove") == {"removed": True}
    assert _files(tmp_path / "home") == []


def test_other_systems_have_no_services():
    with pytest.raises(PipelineError, match="no services on sunos5"):
        module.service_manager("sunos5")


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


def test_folders_that_macos_closes_to_agents_are_known(tmp_path: Path):
    closed = str(tmp_path / "Documents" / "checkout")

    assert protected_folder(("/opt/bin/launch-pipeline", closed), tmp_path) == closed
    assert protected_folder((str(tmp_path / "code"),), tmp_path) == ""


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_key_file_that_can_not_be_read_is_named(tmp_path: Path, content: bytes | None):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(cli, ["serve", "--api-key-file", str(file)], standalone_mode=False)

    assert isinstance(result.exception, InputError)
    assert "put the key alone into it" in str(result.exception)
