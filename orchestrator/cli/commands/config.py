"""`launch-pipeline config`: the values in force without any flag, and their origins; and the completion of a shell."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class
from rich.table import Table
from rich.text import Text

from orchestrator.api.sampling import PRESETS
from orchestrator.cli.configuration import commands, options, origin, secret, unread_variables, yields
from orchestrator.cli.configured_models import table_settings
from orchestrator.cli.pipeline_options import pair_models
from orchestrator.cli.printing import print_whole
from orchestrator.cli.sentences import say
from orchestrator.machine.sampling_defaults import known_sampling
from protocol.errors import InputError
from protocol.messages.sampling import ModelSampling
from protocol.paths import config_file

_MODEL = "the model"
_DEFAULT = re.compile(r"\[default: (?P<value>[^];]+)")


@dataclass(frozen=True)
class SettingRow:
    command: str
    option: str
    value: Any
    origin: str
    """An environment variable, a file, a preset, "the model", or "default"."""


@click.command()
@click.argument("words", metavar="[COMMAND]", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def config(context: click.Context, words: tuple[str, ...], as_json: bool) -> None:
    """Show what is set by the configuration file and the environment, or every option of COMMAND.

    Flags are strongest, then environment variables, then the file, then the model's own sampling values.

    \b
    launch-pipeline config
    launch-pipeline config generate
    LAUNCH_PIPELINE_PRESET=balanced launch-pipeline config chat --json
    """
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    known = dict(commands(root.command))
    if words and words not in known:
        raise InputError(f"There is no command {' '.join(words)!r}: see `launch-pipeline --help`.")
    chosen = {words: known[words]} if words else known
    rows = [row for path, command in chosen.items() for row in _rows(root, path, command)]
    shown = [row for row in rows if words or row.origin not in ("default", _MODEL)]
    file, extra = root.meta.get("configuration"), unread_variables(root.command)
    if file is not None and words in ((), ("serve",)):
        tables = table_settings(file)
        shown += [SettingRow(f"models.{model}", flag, _plain(value), str(file)) for model, flag, value in tables]
    if as_json:
        click.echo(
            json.dumps({"file": file and str(file), "settings": [asdict(row) for row in shown], "unheard": extra})
        )
        return
    say(f"Configuration file: {file or f'{_short(config_file())} (not there)'}")
    for name in extra:
        say(f"No option reads the environment variable {name}.")
    stated = {(" ".join(path), flag): text for path, each in known.items() for flag, text in _stated(each)}
    print_whole(_table(shown, stated, words)) if shown else say("Nothing is set: the defaults are in force.")
    own = [row for row in rows if row.origin == _MODEL and row.command == "generate" and row.value is not None]
    if own and not words:
        say(f"By the model, where nothing is set: {', '.join(f'{row.option} {row.value:g}' for row in own)}.")


def _short(file: Path) -> Path:
    """As a shell reads it, with ~ for the home folder."""
    return Path("~") / file.relative_to(Path.home()) if file.is_relative_to(Path.home()) else file


def _rows(root: click.Context, path: tuple[str, ...], command: click.Command) -> list[SettingRow]:
    """Raises click's error for a value that an option can't take."""
    context = root
    for word in path:
        group = context.command
        assert isinstance(group, click.Group)
        context = click.Context(group.commands[word], info_name=word, parent=context)
    found: dict[str, SettingRow] = {}
    for option in options(command).values():
        assert option.name is not None
        value, source = option.consume_value(context, {})
        if option.hidden and source is ParameterSource.DEFAULT:
            continue
        context.set_parameter_source(option.name, source)
        given = (
            option.type_cast_value(context, value)
            if source is not ParameterSource.DEFAULT
            else option.get_default(context)
        )
        flag = max(option.opts, key=len)
        shown = "(set)" if secret(option, given) else _plain(given)
        found[option.name] = SettingRow(" ".join(path), flag, shown, origin(context, option) or "default")
    preset = str(found["preset"].value) if "preset" in found else ""
    for name, value in PRESETS.get(preset, {}).items():
        if name in found and yields(context, name, "preset"):
            found[name] = SettingRow(found[name].command, found[name].option, value, f"preset {preset}")
    if "preset" in found:
        found |= _of_model(context, found)
    return list(found.values())


def _of_model(context: click.Context, rows: Mapping[str, SettingRow]) -> dict[str, SettingRow]:
    """The rows that are left to the target, with its own values if it is one that is on this machine."""
    left = {name: rows[name] for name in ModelSampling.__struct_fields__ if rows[name].value is None}
    target, pair = rows["target"].value, rows["pair"].value
    if pair is not None and yields(context, "target", "pair"):
        target = pair_models(str(pair))["target"]
    elsewhere = "running" in rows and rows["running"].value is not None
    file = context.find_root().meta.get("configuration")
    several = context.info_name in ("serve", "launch") and target is None and bool(file and table_settings(file))
    own = None if elsewhere or several or not left else known_sampling(target)
    return {name: replace(row, value=own and getattr(own, name), origin=_MODEL) for name, row in left.items()}


def _plain(value: Any) -> Any:
    """For a table and for JSON."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return (
        value if isinstance(value, str | int | float | bool | None) else str(value) if isinstance(value, Path) else None
    )


def _stated(command: click.Command) -> Iterator[tuple[str, str]]:
    """Options that are None unless they are given, and the defaults that their help states."""
    for option in options(command).values():
        if found := _DEFAULT.search(option.help or ""):
            yield max(option.opts, key=len), found["value"]


def _table(rows: list[SettingRow], stated: Mapping[tuple[str, str], str], words: tuple[str, ...]) -> Table:
    """`stated`: what stands for no value, by command and option. `words`: the one command that all rows are of."""
    table = Table(*(("option", "value", "from") if words else ("command", "option", "value", "from")))
    for row in rows:
        value = stated.get((row.command, row.option), "") if row.value is None else str(row.value)
        cells = map(Text, (row.option, value, row.origin))
        table.add_row(*cells) if words else table.add_row(Text(row.command), *cells)
    return table


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    eval "$(launch-pipeline completion zsh)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "launch-pipeline", "_LAUNCH_PIPELINE_COMPLETE").source())
