"""Laws of `bench`: each measurement has its own options."""

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


@pytest.mark.parametrize("words", [["reuse", "--draft-tokens", "2"], ["--bogus"]], ids=str)
def test_an_unknown_option_is_refused(words: list[str], called: list):
    with pytest.raises(click.NoSuchOption):
        cli.main(["bench", *words], standalone_mode=False)
    assert called == []


def test_settings_for_bench_are_those_of_each_measurement(called: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_PIPELINE_BENCH_LIMIT", "7")

    run("reuse")

    assert called[0][1]["limit"] == 7


def test_a_measurement_at_one_temperature_refuses_a_second(called: list):
    words = ["bench", "reuse", "--temperature", "0.7"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert called[0][1]["temperature"] == (0.7,)

    refused = CliRunner().invoke(cli, [*words, "--temperature", "0"])

    assert refused.exit_code == 2
    assert "run it once for each" in refused.stderr
