"""Laws of `bench`: each measurement has its own options, and what was said in 0.1 means the same."""

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.measurements.bench import bench


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """Each measurement that would begin, with its options."""
    found: list[tuple[str, dict]] = []
    for name, command in bench.commands.items():
        monkeypatch.setattr(command, "callback", lambda name=name, **given: found.append((name, given)))
    return found


def run(*words: str) -> str:
    """What it prints on stderr."""
    result = CliRunner().invoke(cli, ["bench", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.parametrize("words", [(), ("--limit", "2", "--strategies", "ar"), ("strategies", "--limit", "2")], ids=str)
def test_strategies_are_compared_unless_something_else_is_named(words: tuple[str, ...], called: list):
    assert run(*words) == ""
    assert [name for name, _ in called] == ["strategies"]


OLD = {
    "--growth --max-tokens 32": ("growth", {"max_tokens": 32}),
    "--limit 3 --requests 1,4": ("requests", {"counts": "1,4", "limit": 3}),
    "--requests=1,4 --draft-tokens 2": ("requests", {"counts": "1,4", "draft_tokens": "2"}),
    "--reuse --turns 5": ("reuse", {"turns": 5}),
    "--micro --json": ("micro", {"as_json": True}),
    "--forward --kind delta --repeats 2": ("forwards", {"kinds": ("delta",), "repeats": 2}),
    "--drafters a,b --no-controls": ("drafters", {"folders": ("a", "b"), "controls": False}),
}


@pytest.mark.parametrize("line", OLD)
def test_an_option_that_chose_a_measurement_still_does_and_names_the_new_form(line: str, called: list):
    name, options = OLD[line]

    printed = run(*line.split())

    assert f"is `bench {name}` now" in printed
    assert "no effect" not in printed
    ((measured, given),) = called
    assert measured == name
    assert {key: given[key] for key in options} == options


def test_options_that_the_measurement_does_not_use_are_named_and_left_out(called: list):
    printed = run("--growth", "--requests", "1", "--draft-tokens", "2", "--no-controls", "--limit", "3")

    assert [line.partition(" has no effect")[0] for line in printed.splitlines()[1:]] == [
        *("--requests", "--draft-tokens", "--no-controls")
    ]
    assert [(name, given["limit"]) for name, given in called] == [("growth", 3)]


@pytest.mark.parametrize("words", [["growth", "--draft-tokens", "2"], ["--growth", "--bogus"], ["--bogus"]], ids=str)
def test_an_unknown_option_is_refused(words: list[str], called: list):
    with pytest.raises(click.NoSuchOption):
        cli.main(["bench", *words], standalone_mode=False)
    assert called == []


def test_settings_for_bench_are_those_of_each_measurement(called: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_PIPELINE_BENCH_LIMIT", "7")

    run("growth")

    assert called[0][1]["limit"] == 7


@pytest.mark.parametrize("line", ["requests 8", "growth", "reuse"])
def test_a_measurement_at_one_temperature_refuses_a_second(line: str, called: list):
    words = ["bench", *line.split(), "--temperature", "0.7"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert called[0][1]["temperature"] == (0.7,)

    refused = CliRunner().invoke(cli, [*words, "--temperature", "0"])

    assert refused.exit_code == 2
    assert "run it once for each" in refused.stderr
