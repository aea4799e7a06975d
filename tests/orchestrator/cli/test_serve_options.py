"""Laws of the options of `serve` on another command: `serve` gets the same values from what is passed on."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.launch.command import launch, serve_words
from orchestrator.cli.commands.serve import serve
from orchestrator.cli.configuration import default_map
from protocol.errors import InputError


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


def _words(words: list[str]) -> tuple[str, ...]:
    with launch.make_context("launch", words, parent=click.Context(cli)) as context:
        return serve_words(context)


@pytest.mark.parametrize("name", _offered())
def test_serve_gets_each_option_of_the_command_line(name: str):
    option = _offered()[name]
    flag = max(option.opts, key=len)
    words = [flag] if option.is_flag else [flag, _value(option)] * (2 if option.multiple else 1)

    assert _words(["codex", *words, "--", "exec", flag]) == tuple(words)
    served, default = (serve.make_context("serve", each, parent=click.Context(cli)).params for each in (words, []))
    assert served[name] != default[name]


def test_settings_of_serve_are_no_settings_of_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`serve` reads them itself, below those of a table [models.NAME]."""
    monkeypatch.setenv("LAUNCH_PIPELINE_TOP_K", "5")
    file = tmp_path / "config.toml"
    file.write_text('target = "x"\n[launch]\nserver = "http://s"\n[serve]\ncontext = 1024\n')
    assert default_map(cli, file)["launch"] == {"server": "http://s"}
    assert _words(["codex"]) == ()

    file.write_text("[launch]\nmax-requests = 3\n")
    with pytest.raises(InputError, match="says 'max_requests', which no option"):
        default_map(cli, file)


def test_where_the_server_listens_is_no_option_of_launch():
    told = CliRunner().invoke(cli, ["launch", "codex", "--port", "1"], standalone_mode=False)

    assert isinstance(told.exception, click.NoSuchOption)


# Options of a pipeline ---------------------------------------------------------------------------


def options(command: str) -> set[str]:
    return {flag for option in cli.commands[command].params for flag in option.opts}


def test_serve_has_every_option_of_a_pipeline():
    assert options("start") == options("serve-workers")
    assert options("start") - options("serve") == set()
