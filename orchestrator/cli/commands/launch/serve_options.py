"""The options of `serve` as options of another command, and back to words for `serve`."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from orchestrator.cli.commands.serve import serve
from orchestrator.cli.configuration import own_setting, setting_name

_NOT_OFFERED = ("host", "port", "api_key", "api_key_file", "no_api_key", "for_starter", "help_all")
"""Where the server listens, and for whom, is decided by the other command."""


class ServeSettings(NamedTuple):
    words: tuple[str, ...]
    """The options on the command line."""
    environment: Mapping[str, str]
    """The other command's own settings from its environment and configuration, as `serve` reads them. Settings of all
    commands are left out: `serve` finds them itself, and its own are stronger."""


def serve_options(command: click.Command) -> click.Command:
    """Adds the options of `serve` that `command` does not have itself."""
    own = {parameter.name for parameter in command.params}
    command.params += [copy.copy(option) for option in _offered() if option.name not in own]
    return command


def serve_settings(context: click.Context) -> ServeSettings:
    """What `serve` must be given so that its options have the values that they have in `context`."""
    words: list[str] = []
    environment: dict[str, str] = {}
    names = {option.name for option in _offered()}
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name not in names:
            continue
        value = context.params[option.name]
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            words += _words(option, value)
        elif own_setting(context, option):
            environment[f"LAUNCH_PIPELINE_SERVE_{setting_name(option).upper()}"] = _text(value)
    return ServeSettings(tuple(words), environment)


def _offered() -> Iterator[click.Option]:
    for parameter in serve.params:
        if isinstance(parameter, click.Option) and parameter.name not in _NOT_OFFERED:
            yield parameter


def _words(option: click.Option, value: Any) -> list[str]:
    flag = max(option.opts, key=len)
    if option.is_flag:
        return [flag] if value else list(option.secondary_opts[:1])
    return [word for each in (value if option.multiple else [value]) for word in (flag, str(each))]


def _text(value: Any) -> str:
    """As click splits it again."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
