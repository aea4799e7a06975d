"""Laws of what programs are started with: each finds server, model and context, and no option holds the key."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.commands.launch.invocation import AskedServer, Invocation
from orchestrator.cli.commands.launch.programs import PROGRAMS

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
        "name": "launch-pipeline",
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


def test_opencode_gets_its_configuration_in_a_variable():
    content = json.loads(_settings("opencode").environment["OPENCODE_CONFIG_CONTENT"] or "")
    provider, _, model = content["model"].partition("/")

    assert model in content["provider"][provider]["models"]
    assert content["provider"][provider]["options"]["apiKey"] == "{env:LAUNCH_PIPELINE_API_KEY}"


def test_continue_gets_a_configuration_of_one_model():
    (model,) = json.loads(_settings("continue").files["continue.yaml"])["models"]

    assert (model["apiBase"], model["apiKey"], model["model"]) == (SERVER.openai, KEY, SERVER.model)
