"""The models that `serve` offers by the configuration's tables [models.NAME], with the options of their pipelines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.configuration import model_defaults, strength
from orchestrator.cli.pipeline_options import pipeline_options
from protocol.errors import InputError

_CHOOSING = ("target", "draft", "pair")
"""Options that say which models there are. Each table has its own; given to `serve` itself they replace the tables, as
an address does."""
_OF_TABLES = ("aliases", "pinned")
_OF_FILE = 1
"""Strength of the configuration file, as of `strength`."""


@dataclass(frozen=True)
class ConfiguredModel:
    """One table."""

    name: str
    aliases: tuple[str, ...]
    """Other names that requests may use."""
    pinned: bool
    settings: PipelineSettings

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@click.command("models")
@click.option("--aliases", multiple=True)
@click.option("--pinned", is_flag=True)
@pipeline_options
def _model(**found: Any) -> dict[str, Any]:
    """The options of one table, checked as those of a command are, as fields of `ConfiguredModel`."""
    return found


def configured_models(context: click.Context, taken: Sequence[str] = ()) -> list[ConfiguredModel]:
    """The models of the configuration file, for the running `serve`; none if it has no such tables, or if a flag or a
    variable names a model.

    A table's option is stronger than the same option of the file for all commands or for `serve`, and weaker than a
    flag or a variable. `taken`: options of `serve` that only one model can have. Raises InputError for a table that
    names no target, and for a name that two models have.
    """
    file = context.find_root().meta.get("configuration")
    if not isinstance(file, Path) or any(strength(context, name) > _OF_FILE for name in (*_CHOOSING, "running")):
        return []
    tables = model_defaults(_model, file)
    for name in taken if tables else ():
        if strength(context, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} is for one model, and {file} has several: name one with --target.")
    models = [_configured(context, name, table, file) for name, table in tables.items()]
    _require_different(models, file)
    return models


def table_settings(file: Path) -> list[tuple[str, str, Any]]:
    """Every setting of the tables, as the model's name, a flag and a value. Raises InputError as above."""
    flags = {option.name: max(option.opts, key=len) for option in _model.params}
    tables = model_defaults(_model, file)
    return [(model, flags[name], value) for model, table in tables.items() for name, value in table.items()]


def _configured(context: click.Context, name: str, table: Mapping[str, Any], file: Path) -> ConfiguredModel:
    if not name.isprintable() or not name.strip():
        raise InputError(f"The configuration {file} has a model without a name: write [models.NAME].")
    if not any(table.get(option) for option in ("target", "pair")):
        raise InputError(f"The configuration {file}, [models.{name}] names no model: give it a target or a pair.")
    common, own = _of_serve(context)
    running = _model.make_context(name, [], parent=context, default_map={**common, **table, **own})
    try:
        with running:
            return ConfiguredModel(name, **_model.invoke(running))
    except InputError as error:
        raise InputError(f"The model {name} can't be served. {error}") from error


def _of_serve(context: click.Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the running command by the file, and those by flags and variables, which are stronger."""
    names = [option.name for option in _model.params if option.name and option.name not in (*_CHOOSING, *_OF_TABLES)]
    known = [name for name in names if name in context.params]
    by_file = [name for name in known if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    stronger = [name for name in known if strength(context, name) > _OF_FILE]
    return {name: context.params[name] for name in by_file}, {name: context.params[name] for name in stronger}


def _require_different(models: Sequence[ConfiguredModel], file: Path) -> None:
    seen: set[str] = set()
    for name in (name for model in models for name in model.names):
        if name in seen:
            raise InputError(f"The configuration {file} calls two models {name!r}: rename one, or drop an alias.")
        seen.add(name)
