"""What people read first: help, mistakes, and tables."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.pairs import pairs_command
from orchestrator.cli.configuration import commands, options


def output(*words: str, width: int = 80) -> str:
    return CliRunner().invoke(cli, words, env={"COLUMNS": str(width)}, terminal_width=width).output


def test_the_first_help_fits_80_columns_and_cuts_no_sentence():
    shown = output("--help")

    assert max(map(len, shown.splitlines())) <= 80
    assert "..." not in shown.replace("[ARGS]...", "")
    assert set(cli.commands) <= {line.split()[0] for line in shown.splitlines() if line.strip()}


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_help_has_what_people_use_and_help_all_the_rest(name: str):
    brief, whole = output(name, "--help"), output(name, "--help-all")
    known = {max(option.opts, key=len) for option in options(cli.commands[name]).values() if not option.hidden}

    assert {flag for flag in known if flag not in whole} == set()
    assert 8 <= sum(f"  {flag} " in brief for flag in known) <= 12
    assert "--help-all" in brief


def test_short_and_other_names():
    assert output("-V") == output("--version")
    assert output("run", "--help") == output("generate", "--help")


def test_what_is_missing_is_one_line():
    for path, command in commands(cli):
        context = click.Context(command, info_name=" ".join(path))
        missing = [each for each in command.params if each.required]
        if missing:
            result = CliRunner().invoke(cli, path)
            assert result.exit_code == 2, context.info_name
            assert "rror" in result.output


@pytest.mark.parametrize(
    ("file", "words"), [("nowhere/x.png", "no folder"), ("x.foo", "must end in .png"), ("sub", "is a directory")]
)
def test_a_picture_that_can_not_be_written_is_refused_before_the_work(
    file: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sub").mkdir()

    def worked(*_: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("orchestrator.cli.commands.plan.predict", worked)
    result = CliRunner().invoke(cli, ["plan", "--plot", str(tmp_path / file)])

    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_pairs_that_fit_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.cli.commands.pairs.memory_bytes", lambda: 12 << 30)

    shown = CliRunner().invoke(pairs_command, []).output
    rows = [line for line in shown.splitlines() if ", fits" in line or "too big" in line]
    fitting = [", fits" in row for row in rows]

    assert fitting == sorted(fitting, reverse=True)
    assert any(fitting)
    assert not all(fitting)


def test_config_shows_the_defaults_that_help_states():
    row = next(line for line in output("config", "chat", width=200).splitlines() if "--draft-tokens" in line)

    assert f"[default: {row.split()[2]};" in " ".join(output("chat", "--help-all").split())
