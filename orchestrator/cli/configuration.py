"""Values of options without a flag: environment variables, then a TOML file. Knows commands only as click's."""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.machine.default_target import VARIABLE
from protocol.bounded_files import read_bounded
from protocol.errors import InputError
from protocol.paths import PREFIXES_VARIABLE, SEGMENTS_VARIABLE, SERVERS_VARIABLE, SESSIONS_VARIABLE

_PREFIX = "LAUNCH_PIPELINE"
_NEVER = ("help", "help_all", "version", "config")
_MODELS = "models"
"""The tables of models that `serve` offers; no command."""
OptionDefaults = dict[str, Any]


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that call it."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def options(command: click.Command) -> dict[str, click.Option]:
    """Its options by their names in a configuration file: the flag with underscores."""
    found = {setting_name(option): option for option in command.params if isinstance(option, click.Option)}
    never = {*_NEVER, *getattr(command, "borrowed", ())}
    return {name: option for name, option in found.items() if name not in never}


def read_environment(command: click.Command, words: tuple[str, ...] = ()) -> None:
    """Let the options of the command that `words` call read LAUNCH_PIPELINE_COMMAND_OPTION (one command) and
    LAUNCH_PIPELINE_OPTION (all that have it). A group's name is for all of its commands."""
    below = commands(command, words) if isinstance(command, click.Group) else [(words, command)]
    for path, each in below:
        for name, option in options(each).items():
            ours = ["_".join((_PREFIX, *path[:length], name)) for length in range(len(path), -1, -1)]
            names = (variable.upper().replace("-", "_") for variable in ours)
            option.envvar = list(dict.fromkeys([*_variables(option), *names]))


def default_map(group: click.Group, file: Path) -> OptionDefaults:
    """The file in the form of click's default map. Raises InputError for an unreadable file and an unknown option."""
    content = {key: value for key, value in _content(file).items() if key != _MODELS}
    return _group_map(group, content, {}, f"The configuration {file}")


def model_defaults(command: click.Command, file: Path) -> dict[str, OptionDefaults]:
    """The file's tables [models.NAME] in their order, each as a default map of `command`. Raises InputError for an
    unknown option and one of another type."""
    tables, where = _content(file).get(_MODELS, {}), f"The configuration {file}"
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InputError(f"{where} gives models no tables: write one for each model, [models.NAME].")
    return {
        name: _command_map(command, table, {}, where, f"{where}, [models.{name}]") for name, table in tables.items()
    }


def secret(option: click.Option, value: Any) -> bool:
    """Whether `value` is a key, which is never shown."""
    return isinstance(value, str | list | tuple) and "key" in setting_name(option).split("_")


def origin(context: click.Context, option: click.Parameter) -> str:
    """The variable or the file that gave `option` its value; empty for flags and defaults."""
    match context.get_parameter_source(option.name or ""):
        case ParameterSource.ENVIRONMENT:
            return next((name for name in _variables(option) if os.environ.get(name)), "")
        case ParameterSource.DEFAULT_MAP:
            return str(context.find_root().meta.get("configuration", "the configuration"))
        case _:
            return ""


def unread_variables(group: click.Group) -> list[str]:
    """Environment variables with our prefix that no option reads."""
    read = {name for _, command in commands(group) for option in command.params for name in _variables(option)}
    read |= {f"{_PREFIX}_CONFIG", VARIABLE, PREFIXES_VARIABLE, SEGMENTS_VARIABLE, SERVERS_VARIABLE, SESSIONS_VARIABLE}
    return sorted(name for name in os.environ if name.startswith(f"{_PREFIX}_") and name not in read)


def _content(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bounded(file, 1).decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"The configuration {file} can't be read ({error.strerror}): check the path.") from error
    except ValueError as error:
        raise InputError(f"The configuration {file} is no TOML: {error}.") from error
    except RecursionError as error:
        raise InputError(f"The configuration {file} is nested too deeply: flatten it.") from error


def _group_map(group: click.Group, content: Mapping[str, Any], inherited: OptionDefaults, where: str) -> OptionDefaults:
    """`inherited`: settings of the levels above, for each command that has the option."""
    below = [options(command) for _, command in commands(group)]
    names = {name for known in below for name in known}
    own: OptionDefaults = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if isinstance(value, dict):
            if key not in group.commands:
                raise _unknown(key, [*group.commands, *names], where)
        elif name not in names:
            raise _unknown(key, [*names, *group.commands], where)
        elif not any(_chooses(known[name], value) for known in below if name in known):
            raise InputError(f"{where} gives {key} the value {value!r}, which no command takes: see their --help.")
        else:
            own[name] = value
    settings = {**inherited, **own}
    made: OptionDefaults = {}
    for word, command in group.commands.items():
        table, place = content.get(word, {}), f"{where}, [{word}]"
        if not isinstance(table, dict):
            table = {}
        if isinstance(command, click.Group):
            made[word] = _group_map(command, table, settings, place)
        else:
            made[word] = _command_map(command, table, settings, where, place)
    return made


def _command_map(
    command: click.Command, table: Mapping[str, Any], inherited: OptionDefaults, above: str, where: str
) -> OptionDefaults:
    known = options(command)
    own = {key.replace("-", "_"): value for key, value in table.items()}
    for key in own:
        if key not in known:
            raise _unknown(key, known, where)
    left = {name: value for name, value in inherited.items() if name in known and name not in own}
    # A common `draft_engine = "ngram"` does not apply to calibrate, which does not offer that engine.
    common = {name: value for name, value in left.items() if _chooses(known[name], value)}
    return {
        known[name].name or name: _fitting(known[name], value, place)
        for settings, place in ((common, above), (own, where))
        for name, value in settings.items()
    }


def _fitting(option: click.Option, value: Any, where: str) -> Any:
    """`value` in the form that click takes. Raises InputError for a value of another type."""
    flag = max(option.opts, key=len)
    if option.is_flag:
        wanted, fits = "true or false", isinstance(value, bool)
    elif option.multiple:
        value = value if isinstance(value, list) else [value]
        wanted, fits = "a list of texts or numbers", all(map(_scalar, value))
    else:
        wanted, fits = "a text or a number", _scalar(value)
    if not fits:
        given = "a value that is not shown" if secret(option, value) else f"the value {value!r}"
        raise InputError(f"{where} gives {flag} {given}, and it takes {wanted}.")
    return value


def _chooses(option: click.Option, value: Any) -> bool:
    """Whether `value` is among the option's choices, if it has any."""
    return not isinstance(option.type, click.Choice) or value in option.type.choices


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _unknown(key: str, known: Any, where: str) -> InputError:
    names = sorted(known)
    nearest = difflib.get_close_matches(key.replace("-", "_"), names, 1, 0.0) or names
    return InputError(f"{where} says {key!r}, which no option or command is called: did you mean {nearest[0]!r}?")


def setting_name(option: click.Option) -> str:
    """Its name in a configuration file and, in capitals, in environment variables."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def _variables(option: click.Parameter) -> list[str]:
    given = option.envvar
    return [given] if isinstance(given, str) else list(given or ())


_STRENGTH = {ParameterSource.DEFAULT_MAP: 1, ParameterSource.ENVIRONMENT: 2, ParameterSource.COMMANDLINE: 3}


def filled_in(options: Mapping[str, Any], preset: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the running command, with `values` for those that were given more weakly than the option `preset`.

    A flag is stronger than the environment, and the environment than the configuration file: --preset on the command
    line wins over a temperature in the file, and --temperature on the command line wins over the preset.
    """
    context = click.get_current_context()
    weaker = {name: value for name, value in values.items() if name in options and yields(context, name, preset)}
    return {**options, **weaker}


def yields(context: click.Context, name: str, other: str) -> bool:
    """Whether option `name` was given more weakly than option `other`."""
    return strength(context, name) < strength(context, other)


def strength(context: click.Context, name: str) -> int:
    """How strongly the option was given: flag, environment, configuration file, not at all (0)."""
    source = context.get_parameter_source(name)
    return 0 if source is None else _STRENGTH.get(source, 0)
