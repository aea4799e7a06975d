"""Laws of old names: they work with a warning that names the new one, and never beside it."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from orchestrator import Pipeline
from orchestrator.api.checked_setup import checked_options
from orchestrator.api.old_names import OLD_NAMES
from orchestrator.cli.app import cli
from orchestrator.cli.options import pipeline_options
from protocol.errors import InputError

OLD = {"--kv-memory": "arena_memory", "--kept-memory": "prefix_cache_memory"}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_a_keyword_warns_and_takes_effect(old: str):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {OLD_NAMES[old]}"):
        options = checked_options({old: 7})

    assert getattr(options, OLD_NAMES[old]) == 7


def test_the_warning_names_the_line_that_made_the_pipeline():
    with pytest.warns(DeprecationWarning, match="kv_memory is now arena_memory") as found:
        Pipeline(kv_memory=7)

    assert found[0].filename == __file__


def test_both_keywords_are_an_error():
    with pytest.raises(InputError, match="kv_memory is the old name of arena_memory: give only arena_memory"):
        checked_options({"kv_memory": 7, "arena_memory": 8})


@click.command()
@pipeline_options
def show(**options: object) -> None:
    click.echo(json.dumps({name: options[name] for name in OLD.values()}))


def run(*arguments: str, **defaults: int) -> Result:
    return CliRunner().invoke(show, arguments, default_map=defaults, standalone_mode=False)


@pytest.mark.parametrize("flag", OLD)
def test_a_flag_warns_on_stderr_and_takes_effect(flag: str):
    found = run(flag, "7")

    assert json.loads(found.stdout)[OLD[flag]] == 7
    new = f"--{OLD[flag].replace('_', '-')}"
    assert found.stderr == f"{flag} is now {new}; the old name goes with the next release.\n"


@pytest.mark.parametrize("flag", OLD)
def test_a_flag_is_not_in_the_help(flag: str):
    assert flag not in CliRunner().invoke(show, ["--help"]).output


def test_both_flags_are_an_error():
    found = run("--kv-memory", "7", "--arena-memory", "7")

    assert isinstance(found.exception, click.UsageError)
    assert "--kv-memory is the old name of --arena-memory" in found.exception.message


def test_the_stronger_of_a_flag_and_a_setting_wins():
    assert json.loads(run("--arena-memory", "8", kv_memory=7).stdout)["arena_memory"] == 8
    assert json.loads(run("--kv-memory", "7", arena_memory=8).stdout)["arena_memory"] == 7


def test_configuration_and_environment_know_old_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "config.toml"
    file.write_text("kv_memory = 7\n")
    monkeypatch.setenv("LAUNCH_PIPELINE_GENERATE_KEPT_MEMORY", "9")

    found = CliRunner().invoke(cli, ["--config", str(file), "config", "generate", "--json"], catch_exceptions=False)
    rows = {row["option"]: row["value"] for row in json.loads(found.output)["settings"]}
    assert (rows["--kv-memory"], rows["--kept-memory"]) == (7, 9)


def test_config_does_not_list_old_names_that_are_not_set():
    found = CliRunner().invoke(cli, ["config", "generate"], catch_exceptions=False)

    assert "--kv-memory" not in found.output
    assert "--arena-memory" in found.output
