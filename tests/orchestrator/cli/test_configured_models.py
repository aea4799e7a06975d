"""Laws of the tables [models.NAME]: checked like a command's options, weaker than flags, replaced by a named target."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.commands.serve import serve
from orchestrator.cli.configured_models import ConfiguredModel, configured_models
from orchestrator.machine.pairs.recommended_pairs import pairs
from protocol.errors import InputError

TWO = """
strategy = "ssd"

[models.small]
target = "org/small"
draft = "org/tiny"
aliases = ["gpt-4o-mini", "default"]
pinned = true

[models."qwen2.5-3b"]
pair = "qwen2.5-3b"
strategy = "sd"
"""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[ConfiguredModel]:
    """What `serve` would offer."""
    models: list[ConfiguredModel] = []

    def started(**_: Any) -> None:
        models.extend(configured_models(click.get_current_context(), ("record",)))

    monkeypatch.setattr(serve, "callback", started)
    return models


def start(folder: Path, content: str, *arguments: str, **environment: str) -> None:
    """Raises what the command raises."""
    file = folder / "config.toml"
    file.write_text(content)
    CliRunner().invoke(
        cli,
        ["--config", str(file), "serve", *arguments],
        env=environment,
        standalone_mode=False,
        catch_exceptions=False,
    )


def test_each_table_is_a_model_with_the_options_of_a_pipeline(tmp_path: Path, found: list[ConfiguredModel]):
    start(tmp_path, TWO)

    small, pair = found
    assert (small.names, small.pinned) == (("small", "gpt-4o-mini", "default"), True)
    assert small.settings.target == "org/small"
    assert small.settings.draft == "org/tiny"
    assert (pair.names, pair.pinned) == (("qwen2.5-3b",), False)
    assert pair.settings.target == pairs()["qwen2.5-3b"].target.id
    assert pair.settings.draft == pairs()["qwen2.5-3b"].draft.id


def test_a_table_beats_the_rest_of_the_file_and_flags_and_variables_beat_the_table(
    tmp_path: Path, found: list[ConfiguredModel]
):
    start(tmp_path, TWO)
    start(tmp_path, TWO, "--strategy", "ar")
    start(tmp_path, TWO, LAUNCH_PIPELINE_SERVE_STRATEGY="adaptive")

    strategies = [model.settings.strategy for model in found]
    assert strategies == ["ssd", "sd", "ar", "ar", "adaptive", "adaptive"]


@pytest.mark.parametrize(
    "arguments", [("--target", "org/other"), ("--pair", "demo"), ("--address", "tcp://127.0.0.1:5570")]
)
def test_a_named_model_replaces_the_tables(tmp_path: Path, found: list[ConfiguredModel], arguments: tuple[str, ...]):
    start(tmp_path, TWO, *arguments)

    assert found == []


def test_a_target_of_the_file_is_for_other_commands(tmp_path: Path, found: list[ConfiguredModel]):
    start(tmp_path, 'target = "org/other"\n' + TWO)

    assert [model.settings.target for model in found] == ["org/small", pairs()["qwen2.5-3b"].target.id]
    start(tmp_path, "")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[models.a]\ndraft = 'x'", "names no model: give it a target or a pair"),
        ("[models.a]\ntarget = 'x'\nstratgy = 3", "did you mean 'strategy'"),
        ("[models.a]\ntarget = 'x'\npinned = 'yes'", "takes true or false"),
        ("[models.a]\ntarget = 'x'\n[models.b]\ntarget = 'y'\naliases = ['a']", "calls two models 'a'"),
        ("models = 3", r"write one for each model, \[models.NAME\]"),
        ("[models.' ']\ntarget = 'x'", "a model without a name"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, found: list[ConfiguredModel], content: str, sentence: str):
    with pytest.raises(InputError, match=sentence):
        start(tmp_path, content)

    assert found == []


def test_a_value_that_no_option_takes_is_refused_as_the_options_are(tmp_path: Path, found: list[ConfiguredModel]):
    with pytest.raises(click.BadParameter, match="not one of '16'"):
        start(tmp_path, "[models.a]\ntarget = 'x'\nkv-bits = '3'")


def test_an_option_for_one_model_is_refused_beside_several(tmp_path: Path, found: list[ConfiguredModel]):
    with pytest.raises(InputError, match="--record is for one model"):
        start(tmp_path, TWO, "--record", str(tmp_path / "log"))
    with pytest.raises(InputError, match="--record is for one model"):
        start(tmp_path, f"record = '{tmp_path}/log'\n{TWO}")
