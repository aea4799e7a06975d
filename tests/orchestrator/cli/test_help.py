"""What people read first: help, mistakes, and tables."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.pairs import pairs_command
from orchestrator.cli.configuration import commands, options
from orchestrator.lab.simulate.plan import PLAIN_NAME, Prediction
from orchestrator.machine.pairs.recommended_pairs import pairs


def output(*words: str, width: int = 80) -> str:
    return CliRunner().invoke(cli, words, env={"COLUMNS": str(width)}, terminal_width=width).output


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", [(), ("cache",), ("service",), ("workers",)], ids=" ".join)
def test_a_list_of_commands_is_complete_and_cuts_no_sentence(words: tuple[str, ...], width: int):
    group = cli.commands[words[0]] if words else cli
    assert isinstance(group, click.Group)
    shown = " ".join(output(*words, "--help", width=width).split())

    for name, command in group.commands.items():
        assert f" {name} {' '.join(command.get_short_help_str(1000).split())}" in shown


def test_every_help_fits_the_terminal():
    """Examples, and an option with all its values."""
    for path, _ in commands(cli):
        lines = output(*path, "--help").splitlines()

        assert max(map(len, lines)) <= 80, (path, max(lines, key=len))


def test_help_has_what_people_use_and_help_all_the_rest():
    """Of every command with many options."""
    for path, command in commands(cli):
        brief = output(*path, "--help")
        first = {line.split()[0].rstrip(",") for line in brief.splitlines() if line.startswith("  -")}
        known = {max(option.opts, key=len) for option in options(command).values() if not option.hidden}
        listed = known & first
        if len(known) <= 14:
            assert listed == known, path
            continue

        assert 8 <= len(listed) <= 12, path
        assert "--help-all" in first
        assert {flag for flag in known if flag not in output(*path, "--help-all")} == set()


NO_FOLDER = "since there is no folder {folder}/file"


@pytest.mark.parametrize(
    ("words", "file", "reason"),
    [
        *(
            (words, "file/deep/x", NO_FOLDER)
            for words in (
                ("convert", "--out"),
                ("train-draft", "--target", "x", "--out"),
                ("train-draft", "--target", "x", "--out", "new", "--work"),
                ("profile", "--out"),
                ("first-light", "--out"),
                ("calibrate", "--out"),
                ("generate", "x", "--record"),
            )
        ),
        (("calibrate", "--out"), "sub", "is a directory"),
    ],
)
def test_a_folder_or_file_that_can_not_be_written_is_refused_before_the_work(
    words: tuple[str, ...], file: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    (tmp_path / "sub").mkdir()

    result = CliRunner().invoke(cli, [*words, str(tmp_path / file)])

    assert result.exit_code == 2
    assert reason.format(folder=tmp_path) in " ".join(result.output.split())


@pytest.mark.parametrize("width", [40, 80])
def test_tables_fit_the_terminal_and_nothing_of_them_is_cut(width: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("LAUNCH_PIPELINE_STOP", "a-text-that-is-longer-than-its-column")

    wide, narrow = (click.unstyle(output("config", "generate", width=each)) for each in (1000, width))

    of_table = [line for line in narrow.splitlines() if not line.startswith(("Configuration", "No option", "By the"))]
    assert max(len(line.rstrip()) for line in of_table) <= width
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))


def test_pairs_has_rows_for_those_that_fit_and_a_sentence_for_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.cli.commands.pairs.memory_bytes", lambda: 12 << 30)

    shown = CliRunner().invoke(pairs_command, []).output
    table, others = shown.split("Too big for this machine: ")
    fitting = [line.split()[0] for line in table.splitlines() if ", fits" in line]

    assert "qwen2.5-1.5b" in fitting
    assert "llama3.3-70b (" in others
    listed = {*fitting, *(word for word in others.split() if word in pairs())}
    assert sorted(pairs()[name].target.id for name in listed) == sorted({pair.target.id for pair in pairs().values()})


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        (("plan", "--temperature", "0"), "m4-16gb-qwen2.5-3b"),
        (("pairs",), "For this machine."),
    ],
)
def test_the_first_line_says_whose_figures_follow(
    words: tuple[str, ...], whose: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    known = [
        Prediction(contender=name, tokens_per_second=9.0, tokens_per_round=1.0) for name in (PLAIN_NAME, "adaptive")
    ]
    monkeypatch.setattr("orchestrator.cli.commands.plan.predict", lambda _: known)
    monkeypatch.setattr("orchestrator.cli.commands.plan.by_acceptance", lambda _: [])
    first, *_ = output(*words).splitlines()

    assert whose in first


def test_config_shows_the_defaults_that_help_states():
    row = next(line for line in output("config", "chat", width=200).splitlines() if "--draft-tokens" in line)

    assert f"[default: {row.split()[1]}]" in " ".join(output("chat", "--help-all").split())
