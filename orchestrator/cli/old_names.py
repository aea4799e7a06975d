"""Flags, configuration keys and environment variables under their old names. Delete this file with the table."""

import functools
from collections.abc import Callable
from typing import Any

import click

from orchestrator.api.old_names import OLD_NAMES
from orchestrator.cli.precedence import strength


def with_old_names(command: Callable[..., Any]) -> Callable[..., Any]:
    """Hidden options under the old names, whose values the command gets under the present ones."""

    @functools.wraps(command)
    def translated(*arguments: Any, **options: Any) -> Any:
        for old, new in OLD_NAMES.items():
            value = options.pop(old)
            if value is not None and _replaces(old, new):
                options[new] = value
        return command(*arguments, **options)

    for old in OLD_NAMES:
        translated = click.option(_flag(old), type=int, hidden=True)(translated)
    return translated


def _replaces(old: str, new: str) -> bool:
    """Warn on stderr; whether the old name was given with more strength than the new one. An error if with the same."""
    context = click.get_current_context()
    if strength(context, old) == strength(context, new):
        raise click.UsageError(f"{_flag(old)} is the old name of {_flag(new)}: give only {_flag(new)}.")
    click.echo(f"{_flag(old)} is now {_flag(new)}; the old name goes with the next release.", err=True)
    return strength(context, old) > strength(context, new)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
