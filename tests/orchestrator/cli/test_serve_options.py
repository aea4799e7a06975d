"""Laws of the options of `serve` on another command: `serve` gets the same values from what is passed on."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.launch.command import ServeSettings, launch, serve_settings
from orchestrator.cli.commands.serve import serve
from orchestrator.cli.configuration import default_map, read_environment
from tests.orchestrator.cli.test_cli import run, sentence


def _offered() -> dict[str, click.Option]:
    kept = {parameter.name for parameter in launch.params}
    return {
        option.name: option
        for option in serve.params
        if isinstance(option, click.Option) and option.name and option.name in kept - {"api_key", "help_all"}
    }


def _value(option: click.Option) -> str:
    """Another one than the default."""
    kind = option.type
    if isinstance(kind, click.Choice):
        return next(str(choice) for choice in reversed(kind.choices) if choice != option.default)
    if isinstance(kind, click.IntRange):
        return str(kind.max if kind.max is not None else (kind.min or 0) + 3)
    return "0.5" if isinstance(kind, click.FloatRange) else "some-name"


@pytest.fixture(autouse=True, scope="module")
def _environment() -> None:
    """The options have their variables, as once a command has begun."""
    read_environment(cli)


def _settings(words: list[str]) -> ServeSettings:
    with launch.make_context("launch", words, parent=click.Context(cli)) as context:
        return serve_settings(context)


def _served(settings: ServeSettings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name, value in settings.environment.items():
        monkeypatch.setenv(name, value)
    return serve.make_context("serve", list(settings.words), parent=click.Context(cli)).params


@pytest.mark.parametrize("name", _offered())
def test_serve_gets_each_option_of_the_command_line(name: str, monkeypatch: pytest.MonkeyPatch):
    option = _offered()[name]
    flag = max(option.opts, key=len)
    words = [flag] if option.is_flag else [flag, _value(option)] * (2 if option.multiple else 1)
    expected = serve.make_context("serve", list(words), parent=click.Context(cli)).params

    settings = _settings(["codex", *words, "--", "exec", flag])

    assert settings.words == tuple(words)
    assert _served(settings, monkeypatch) == expected
    assert expected[name] != serve.make_context("serve", [], parent=click.Context(cli)).params[name]


def test_settings_of_the_environment_are_weaker_than_options_for_serve_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_PIPELINE_LAUNCH_TEMPERATURE", "0.25")
    monkeypatch.setenv("LAUNCH_PIPELINE_LAUNCH_MODEL_NAME", "a b")
    monkeypatch.setenv("LAUNCH_PIPELINE_LAUNCH_ADDRESS", "ipc:///a")

    settings = _settings(["codex", "--preset", "creative"])

    assert settings.words == ("--preset", "creative")
    assert _served(settings, monkeypatch)["temperature"] == 0.25
    assert _served(settings, monkeypatch)["running"] == "ipc:///a"
    assert _served(settings, monkeypatch)["model_name"] == ("a", "b")


def test_only_what_launch_alone_is_told_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`serve` reads what is for all commands itself, below its own settings and those of a table [models.NAME]."""
    file = tmp_path / "config.toml"
    file.write_text(
        'target = "x"\ncontext = 512\n[launch]\nmax-requests = 3\nplacement = "apart"\n[serve]\ncontext = 1024\n'
    )
    monkeypatch.setenv("LAUNCH_PIPELINE_TOP_K", "5")
    monkeypatch.setenv("LAUNCH_PIPELINE_LAUNCH_TOP_P", "0.5")
    parent = click.Context(cli, default_map=default_map(cli, file))
    parent.meta["configuration"] = file

    with launch.make_context(
        "launch", ["codex"], parent=parent, default_map=parent.lookup_default("launch")
    ) as context:
        settings = serve_settings(context)

    assert settings == (
        (),
        {
            "LAUNCH_PIPELINE_SERVE_MAX_REQUESTS": "3",
            "LAUNCH_PIPELINE_SERVE_PLACEMENT": "apart",
            "LAUNCH_PIPELINE_SERVE_TOP_P": "0.5",
        },
    )


def test_where_the_server_listens_is_no_option_of_launch():
    told = CliRunner().invoke(cli, ["launch", "codex", "--port", "1"], standalone_mode=False)

    assert isinstance(told.exception, click.NoSuchOption)


# Options of a pipeline ---------------------------------------------------------------------------


def options(command: str) -> set[str]:
    return {flag for option in cli.commands[command].params for flag in option.opts}


def test_serve_has_every_option_of_a_pipeline():
    assert options("start") == options("serve-workers")
    assert options("start") - options("serve") == set()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["start", "serve"])
def test_nothing_is_announced_where_nobody_can_come(command: str):
    code, _, errors = run(command, "--announce", "studio")

    assert code == 2
    assert "add --listen HOST:PORT" in sentence(errors)
