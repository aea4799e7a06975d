"""Laws of settings: flags beat the environment, which beats the file; an unknown setting is named."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli.app import cli
from orchestrator.cli.configuration import commands, default_map, options, read_environment
from orchestrator.cli.sampling_options import sampling, sampling_options
from protocol.errors import InputError


@click.group()
@click.option("--config", "file", type=click.Path(path_type=Path))
@click.pass_context
def tool(context: click.Context, file: Path | None) -> None:
    context.default_map = {} if file is None else default_map(tool, file)


@tool.command()
@sampling_options
@click.option("--json", "as_json", is_flag=True)
@click.option("--engine", type=click.Choice(["mlx", "ngram"]), default="mlx")
def say(as_json: bool, engine: str, **given) -> None:
    params = sampling(given)
    click.echo(
        json.dumps([as_json, engine, params.temperature, params.top_p, params.max_tokens, list(params.stop or ())])
    )


@tool.command()
@click.option("--engine", type=click.Choice(["mlx"]), default="mlx")
@click.option("--temperature", type=float, multiple=True)
def measure(engine: str, temperature: tuple[float, ...]) -> None:
    click.echo(json.dumps([engine, list(temperature)]))


read_environment(tool)


def run(folder: Path, content: str, *arguments: str, **environment: str) -> list:
    """What the command says it was given; raises what it raises."""
    file = folder / "config.toml"
    file.write_text(content)
    found = CliRunner().invoke(
        tool, ["--config", str(file), *arguments], env=environment, standalone_mode=False, catch_exceptions=False
    )
    if found.exception is not None:
        raise found.exception
    return json.loads(found.output)


def test_a_schema_is_read_from_its_file(tmp_path: Path):
    read = []

    @click.command()
    @sampling_options
    def write(**given) -> None:
        read.append(sampling(given))

    (tmp_path / "schema.json").write_text('{"type": "object"}')
    asked = ["--json-schema", str(tmp_path / "schema.json"), "--frequency-penalty", "0.5"]
    CliRunner().invoke(write, asked, catch_exceptions=False)
    (tmp_path / "schema.json").write_text('{"type": "nonsense"}')
    refused = CliRunner().invoke(write, asked)

    assert [(params.json_schema, params.frequency_penalty) for params in read] == [('{"type": "object"}', 0.5)]
    assert isinstance(refused.exception, InputError)


def test_a_table_holds_for_one_command_and_the_top_for_all_that_know_it(tmp_path: Path):
    content = 'temperature = 0.5\nengine = "ngram"\n[say]\nmax-tokens = 3\njson = true\nstop = ["a b", "c"]\n'

    assert run(tmp_path, content, "say") == [True, "ngram", 0.5, None, 3, ["a b", "c"]]
    assert run(tmp_path, content, "measure") == ["mlx", [0.5]]
    assert run(tmp_path, 'stop = "x"\n[say]\nengine = "mlx"', "say") == [False, "mlx", None, None, None, ["x"]]


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path):
    content = "temperature = 0.1\ntop_p = 0.1\nmax_tokens = 1\nseed = 1"
    environment = {
        "LAUNCH_PIPELINE_TEMPERATURE": "0.2",
        "LAUNCH_PIPELINE_TOP_P": "0.2",
        "LAUNCH_PIPELINE_SAY_TOP_P": "0.3",
        "LAUNCH_PIPELINE_JSON": "1",
    }

    assert run(tmp_path, content, "say", "--temperature", "0.4", **environment) == [True, "mlx", 0.4, 0.3, 1, []]


@pytest.mark.parametrize(
    ("content", "flags", "environment", "expected"),
    [
        ("", ["--preset", "balanced"], {}, (0.7, 0.95)),
        ("", ["--preset", "default"], {}, (0.7, 0.95)),
        ("temperature = 0.1", ["--preset", "balanced"], {}, (0.7, 0.95)),
        ("temperature = 0.1", [], {"LAUNCH_PIPELINE_PRESET": "balanced"}, (0.7, 0.95)),
        ('preset = "balanced"', ["--temperature", "0.1"], {}, (0.1, 0.95)),
        ('preset = "balanced"\ntop_p = 0.5', [], {}, (0.7, 0.5)),
        ("", ["--preset", "greedy", "--top-p", "0.5"], {}, (0.0, 0.5)),
    ],
)
def test_a_preset_gives_way_to_what_is_asked_for_as_strongly(
    tmp_path: Path, content: str, flags: list[str], environment: dict[str, str], expected: tuple[float, float]
):
    assert tuple(run(tmp_path, content, "say", *flags, **environment)[2:4]) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("temprature = 1", "did you mean 'temperature'"),
        ("[sya]\nseed = 1", "did you mean 'say'"),
        ("[measure]\ntemprature = 1", r"\[measure\].*did you mean 'temperature'"),
        ("say = 3", "did you mean"),
        ("json = 3", "takes true or false"),
        ("temperature = [1]", "takes a text or a number"),
        ("seed = true", "takes a text or a number"),
        ("stop = [[1]]", "takes a list"),
        ("seed = 2020-01-01", "takes a text or a number"),
        ('engine = "gpu"', "no command takes"),
        ("engine", "is no TOML"),
        ("a = " + "[" * 3000, "nested too deeply"),
        ("seed = " + "9" * 5000, "is no TOML"),
        ("config = 'x'", "did you mean"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(tmp_path: Path, content: str, words: str):
    with pytest.raises(InputError, match=words):
        run(tmp_path, content, "say")


@pytest.mark.parametrize(
    ("file", "words"), [("none.toml", "can't be read"), ("noise.toml", "no TOML"), ("/dev/zero", "more than 1 MiB")]
)
def test_a_file_that_is_not_there_or_is_no_text_is_a_sentence(tmp_path: Path, file: str, words: str):
    (tmp_path / "noise.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(InputError, match=words):
        default_map(tool, tmp_path / file)


def test_config_says_what_is_in_force_and_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "launch-pipeline"
    folder.mkdir()
    file = folder / "config.toml"
    file.write_text('draft_engine = "ngram"\n[generate]\nmax_tokens = 7\npreset = "creative"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LAUNCH_PIPELINE_CONFIG")
    monkeypatch.setenv("LAUNCH_PIPELINE_GENERATE_TOP_P", "0.5")
    monkeypatch.setenv("LAUNCH_PIPELINE_TOPP", "0.5")

    def settings(*arguments: str) -> dict:
        found = CliRunner().invoke(cli, ["config", "--json", *arguments], catch_exceptions=False)
        answer = json.loads(found.output)
        assert answer["file"] == str(file)
        assert answer["unheard"] == ["LAUNCH_PIPELINE_TOPP"]
        return {(row["command"], row["option"]): (row["value"], row["origin"]) for row in answer["settings"]}

    one, everything = settings("generate"), settings()
    assert one["generate", "--max-tokens"] == (7, str(file))
    assert one["generate", "--top-p"] == (0.5, "LAUNCH_PIPELINE_GENERATE_TOP_P")
    assert one["generate", "--temperature"] == (1.0, "preset creative")
    assert one["generate", "--strategy"] == ("adaptive", "default")
    assert everything["start", "--draft-engine"] == ("ngram", str(file))
    assert ("generate", "--strategy") not in everything
    assert ("calibrate", "--draft-engine") not in everything


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_config_shows_the_model_s_own_sampling_where_nothing_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    monkeypatch.setenv("LAUNCH_PIPELINE_TOP_K", "7")

    def shown(target: str) -> list[tuple[Any, str]]:
        monkeypatch.setenv("LAUNCH_PIPELINE_TARGET", target)
        found = CliRunner().invoke(cli, ["config", "--json", command], catch_exceptions=False)
        rows = {row["option"]: (row["value"], row["origin"]) for row in json.loads(found.output)["settings"]}
        return [rows["--temperature"], rows["--top-k"], rows["--min-p"]]

    assert shown(str(model)) == [(0.6, "the model"), (7, "LAUNCH_PIPELINE_TOP_K"), (0.0, "the model")]
    assert shown("nobody/nothing") == [(None, "the model"), (7, "LAUNCH_PIPELINE_TOP_K"), (None, "the model")]


def test_config_says_that_each_of_a_server_s_models_has_its_own_sampling(tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text('[models.small]\npair = "demo"\n')

    found = CliRunner().invoke(cli, ["--config", str(file), "config", "--json", "serve"], catch_exceptions=False)

    rows = {row["option"]: (row["value"], row["origin"]) for row in json.loads(found.output)["settings"]}
    assert rows["--temperature"] == (None, "the model")


def test_every_option_of_every_command_can_be_in_the_file_under_one_name():
    for path, command in commands(cli):
        known = options(command)
        assert len({option.name for option in known.values()}) == len(known), path


@pytest.mark.parametrize("words", [(), ("serve",), ("--json",), ("serve", "--json")])
@pytest.mark.parametrize("place", ["environment", "file"])
def test_no_setting_is_told_that_is_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: tuple[str, ...]
):
    file = tmp_path / "config.toml"
    file.write_text('[serve]\napi_key = "secret-of-mine"\n' if place == "file" else "")
    monkeypatch.setenv("LAUNCH_PIPELINE_CONFIG", str(file))
    if place == "environment":
        monkeypatch.setenv("LAUNCH_PIPELINE_API_KEY", "secret-of-mine")

    found = CliRunner().invoke(cli, ["config", *words], catch_exceptions=False)

    assert "--api-key" in found.output
    assert "(set)" in found.output
    assert "secret-of-mine" not in found.output


def test_a_key_that_the_file_gives_in_the_wrong_form_is_not_told_either(tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text('[serve]\napi_key = ["secret-of-mine"]\n')

    with pytest.raises(InputError, match="gives --api-key a value that is not shown") as refused:
        default_map(cli, file)

    assert "secret-of-mine" not in str(refused.value)


def test_that_no_key_is_asked_for_is_no_secret():
    found = CliRunner().invoke(cli, ["config", "serve", "--json"], catch_exceptions=False)

    values = {row["option"]: row["value"] for row in json.loads(found.output)["settings"]}
    assert (values["--no-api-key"], values["--api-key"]) == (False, None)
