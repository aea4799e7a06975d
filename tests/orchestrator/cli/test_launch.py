"""Laws of `launch`: each program finds server, model and context, no option holds the key, and its end is its own."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.request import OpenerDirector

import msgspec
import pytest

from orchestrator.cli.commands.launch.command import run_program, with_settings
from orchestrator.cli.commands.launch.programs import PROGRAMS, AgentProgram, AskedServer, Invocation
from orchestrator.cli.commands.launch.server import HttpServer, http_server
from protocol.errors import InputError, PipelineError
from tests.support.fake_models import FakeModels
from tests.support.fake_pipeline import READY, FakePipeline
from tests.support.http_server import KEY as SERVERS_KEY
from tests.support.http_server import ListeningServer, listening, running

KEY = 'lp-"key"'
SERVER = AskedServer(address="http://127.0.0.1:1234", key=KEY, model="Qwen/Qwen2.5-3B", context=4096)
FOLDER = Path("/private")


def _settings(name: str, server: AskedServer = SERVER) -> Invocation:
    return PROGRAMS[name].settings(server, FOLDER)


def _content(invocation: Invocation) -> str:
    return " ".join([*invocation.options, *filter(None, invocation.environment.values()), *invocation.files.values()])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_learns_address_model_and_context_with_the_key_where_only_it_can_see_it(name: str):
    invocation = _settings(name)

    assert all(part in _content(invocation) for part in (SERVER.address, SERVER.model, "4096"))
    assert not any("lp-" in word for word in invocation.options)
    private = [*filter(None, invocation.environment.values()), *invocation.files.values()]
    assert any(KEY in text or json.dumps(KEY) in text for text in private)
    pointed = [word for word in _content(invocation).split() if word.startswith(f"{FOLDER}/")]
    assert {Path(word).name for word in pointed} == set(invocation.files)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unknown_context_is_not_made_up(name: str):
    server = AskedServer(address=SERVER.address, key=KEY, model="m")

    assert "None" not in _content(_settings(name, server))
    assert "4096" not in _content(_settings(name, server))


def test_codex_gets_its_provider_as_toml():
    options = _settings("codex").options
    read: dict[str, Any] = tomllib.loads("\n".join(options[1::2]))

    assert set(options[::2]) == {"-c"}
    assert read["model_providers"][read["model_provider"]] == {
        "name": "Azure",
        "base_url": "http://127.0.0.1:1234/v1",
        "env_key": "LAUNCH_PIPELINE_API_KEY",
        "wire_api": "responses",
    }
    assert (read["model"], read["model_context_window"]) == (SERVER.model, 4096)


def test_claude_gets_the_same_by_settings_and_environment_and_loses_what_leads_elsewhere():
    invocation = _settings("claude")
    option, file = invocation.options
    told = json.loads(invocation.files[Path(file).name])["env"]

    assert option == "--settings"
    assert told == {name: value for name, value in invocation.environment.items() if value is not None}
    assert told["ANTHROPIC_BASE_URL"] == SERVER.address
    assert {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} <= set(invocation.environment) - set(told)


@pytest.mark.parametrize(("context", "output"), [(32_768, 8_192), (262_144, 32_000)])
def test_claude_leaves_most_of_the_context_to_the_conversation(context: int, output: int):
    server = AskedServer(address=SERVER.address, key=KEY, model="m", context=context)
    invocation = _settings("claude", server)

    assert invocation.environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context)
    assert invocation.defaults == {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output)}


def test_opencode_and_continue_get_a_configuration_of_one_model():
    content = json.loads(_settings("opencode").environment["OPENCODE_CONFIG_CONTENT"] or "")
    provider, _, name = content["model"].partition("/")
    (model,) = json.loads(_settings("continue").files["continue.yaml"])["models"]

    assert name in content["provider"][provider]["models"]
    assert content["provider"][provider]["options"]["apiKey"] == "{env:LAUNCH_PIPELINE_API_KEY}"
    assert (model["apiBase"], model["apiKey"], model["model"]) == (SERVER.openai, KEY, SERVER.model)


# The program in the foreground -------------------------------------------------------------------


PLAIN = AskedServer(address="http://127.0.0.1:1234", key="a-key", model="m")


def _run(script: str, *arguments: str, files: dict[str, str] | None = None) -> int:
    def settings(server: AskedServer, folder: Path) -> Invocation:
        options = ("-c", script, str(folder), server.key)
        return Invocation(options=options, environment={"GIVEN": "1", "REMOVED": None}, files=files or {})

    program = AgentProgram(command="python", install="", settings=settings)
    return run_program(sys.executable, program, PLAIN, arguments)


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

    assert run_program(sys.executable, program, PLAIN, ("-c", "import os; os._exit(int(os.environ['CODE']))")) == code


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_programs(script: str, code: int):
    assert _run(script) == code


def test_a_request_to_end_that_comes_before_the_program_is_known_reaches_it(monkeypatch: pytest.MonkeyPatch):
    def started(*words: Any, real: Any = subprocess.Popen, **options: Any) -> subprocess.Popen[bytes]:
        process = real(*words, **options)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)

    assert _run("import time; time.sleep(60)") == 128 + signal.SIGTERM


def test_what_is_no_program_is_told(tmp_path: Path):
    (tmp_path / "broken").write_text("")
    program = AgentProgram(command="broken", install="", settings=lambda *_: Invocation())

    with pytest.raises(PipelineError, match="can't be started"):
        run_program(str(tmp_path / "broken"), program, PLAIN, ())


WAITER = """
import os, signal, sys
from orchestrator.cli.commands.launch.programs import AgentProgram, Invocation, AskedServer
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


# What it must know of a server -------------------------------------------------------------------


def _asked(server: ListeningServer, key: str | None = SERVERS_KEY) -> HttpServer:
    return http_server("http://{}:{}/v1/".format(*server.address), key)


def test_a_server_tells_its_models_their_context_and_whether_they_know_tools(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with listening(names=("owner/model", "other")) as listener:
        server = _asked(listener)

        assert (server.state(), server.ready()) == ("ok", True)
        assert server.models() == ["owner/model", "other"]
        assert server.context("owner/model") == READY.context
        # The demo target's folder has no chat template.
        assert not server.knows_tools("other")


def test_a_name_that_a_program_would_read_a_file_for_is_none():
    """opencode replaces it by the file's content, which it then sends to the server as the model's name."""
    with listening(names=("{file:~/.ssh/id_rsa}", "${HOME}", "owner's model")) as listener:
        assert _asked(listener).models() == ["owner's model"]
    with listening(names=("{env:HOME}",)) as listener, pytest.raises(PipelineError, match="names no models"):
        _asked(listener).models()


def test_a_server_that_loads_is_not_ready_and_a_failed_one_says_why():
    with listening(FakePipeline(condition=None)) as listener:
        assert not _asked(listener).ready()
    failed = msgspec.structs.replace(READY, failure="no memory")
    with listening(FakePipeline(condition=failed)) as listener, pytest.raises(PipelineError, match="no memory"):
        _asked(listener).ready()


def test_one_of_several_models_is_loaded_before_it_is_asked_for_its_context(monkeypatch: pytest.MonkeyPatch):
    """Whether it knows tools is an answer that waits longer than others."""
    patience: list[float] = []

    def opened(*arguments: Any, timeout: float, real: Any = OpenerDirector.open) -> Any:
        patience.append(timeout)
        return real(*arguments, timeout=timeout)

    monkeypatch.setattr(OpenerDirector, "open", opened)
    models = FakeModels(failures={"other": "There is no such folder."})
    with running(models.listener()) as listener:
        server = _asked(listener)
        assert (server.models()[0], server.context("big")) == ("big", None)

        assert not server.knows_tools("big")

        assert server.context("big") == READY.context
        assert sorted(patience)[-1] > 10 * sorted(patience)[-2]
        with pytest.raises(PipelineError, match=r"can't serve other\. The model other can't be loaded\. There is no"):
            server.knows_tools("other")


def test_a_wrong_key_and_no_server_are_told():
    with listening() as listener:
        server = _asked(listener)
        for key in (None, "wrong-key"):
            with pytest.raises(InputError, match="refuses this key"):
                _asked(listener, key).models()

    with pytest.raises(PipelineError, match="No server answers at http"):
        server.models()


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "tcp://127.0.0.1:5570", "http://", "http://a/v1/models"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(InputError, match="no address of a server"):
        http_server(url, None)
