"""Which of two settings is stronger: a preset, a pair or a single option. Pure but for click."""

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

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
