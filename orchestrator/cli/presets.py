"""Named sets of sampling values, and which of two settings is stronger. Pure but for click."""

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.api.sampling_fields import number_fields

NOT_PRESET = {
    "repetition_context": "only matters with a repetition penalty, which no preset sets",
    "frequency_penalty": "no preset penalises what was generated",
    "presence_penalty": "no preset penalises what was generated",
    "logprobs": "reports, and changes no token",
    "verification": "chooses the acceptance rule, and not the distribution",
}
"""Fields of `SamplingFields` that a preset does not set, and why."""
PRESET_FIELDS = number_fields(NOT_PRESET)
_PLAIN = {field.name: field.default for field in PRESET_FIELDS}
_BALANCED = _PLAIN | {"temperature": 0.7, "top_p": 0.95}
PRESETS: dict[str, dict[str, Any]] = {
    "default": _BALANCED,
    "greedy": _PLAIN,
    "conservative": _PLAIN | {"temperature": 0.3, "top_p": 0.9},
    "balanced": _BALANCED,
    "creative": _PLAIN | {"temperature": 1.0, "min_p": 0.05},
}
"""Customary values, not tuned for any model. The tokens are the target's own with any of them; a draft guesses fewer
tokens at a higher temperature."""

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
