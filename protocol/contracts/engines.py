"""The engines by name, as options and workers use the names. Imports no engine.

A draft engine is a module of draft_worker.engines with a literal constant `ENGINE = EngineDeclaration(...)` and a
function `load(setup: WorkerSetup) -> Engine`. The module's name is the engine's name. No other registration is needed:
the declaration is read from the module's source, since the orchestrator must not import the draft worker.
"""

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from protocol.errors import InputError

DraftEngineName: TypeAlias = str
"""A key of `draft_engines`, NO_DRAFT, or AUTO until the engine is chosen."""
NO_DRAFT = "none"
"""The orchestrator starts no draft worker."""

TargetEngineName = Literal["mlx", "none"]
"""none: the pipeline waits for a target of another machine."""

PrefillEngineName = Literal["none", "mlx", "guest"]
"""The engine of the prefill worker; guest: a prefill worker of another machine, which sees the prompts."""

AUTO: DraftEngineName = "auto"
"""The engine of a trained drafter; for a language model MLX, and on Apple silicon the faster of MLX and Core ML, which
the pipeline finds out while it runs."""

DraftModel: TypeAlias = Literal["checkpoint", "package", "drafter", "none"]
"""The model of an engine: a checkpoint's folder, a Core ML package converted from it, a trained drafter beside its
target's folder, or none."""


class EngineDeclaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declaration of a draft engine, in its module."""

    help: str
    """One line for the command line."""
    model: DraftModel
    hidden: bool = False
    """The command line does not offer it; only measurements use it."""


@cache
def draft_engines() -> Mapping[DraftEngineName, EngineDeclaration]:
    """Every engine of the installed draft worker, hidden ones too, in the order of their names."""
    package = importlib.util.find_spec("draft_worker")
    locations = package.submodule_search_locations if package else None
    return declared_engines(Path(next(iter(locations))) / "engines") if locations else MappingProxyType({})


def offered_engines() -> dict[DraftEngineName, EngineDeclaration]:
    """The engines that the command line offers."""
    return {name: engine for name, engine in draft_engines().items() if not engine.hidden}


def draft_engine(name: DraftEngineName) -> EngineDeclaration:
    """Raises InputError, which names the choices, if no engine has this name."""
    if name not in draft_engines():
        raise InputError(
            f"There is no draft engine called {name!r}: choose {AUTO}, {', '.join(offered_engines())} or none."
        )
    return draft_engines()[name]


def draft_model(name: DraftEngineName) -> DraftModel:
    """The kind of model of engine `name`, "none" for NO_DRAFT. Raises InputError as `draft_engine` does."""
    if name == AUTO:
        return "checkpoint"
    return "none" if name == NO_DRAFT else draft_engine(name).model


def declared_engines(folder: Path) -> Mapping[DraftEngineName, EngineDeclaration]:
    """The engines that the modules in `folder` declare. A module without a literal declaration is no engine."""
    found = {file.stem: _declaration(file) for file in sorted(folder.glob("*.py"))}
    return MappingProxyType({name: engine for name, engine in found.items() if engine is not None})


def _declaration(file: Path) -> EngineDeclaration | None:
    try:
        for statement in ast.parse(file.read_bytes()).body:
            match statement:
                case ast.Assign([ast.Name("ENGINE")], ast.Call(ast.Name("EngineDeclaration"), [], keywords)):
                    given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                    return msgspec.convert(given, EngineDeclaration)
                case _:
                    pass
    except (SyntaxError, ValueError, msgspec.ValidationError):
        return None
    return None
