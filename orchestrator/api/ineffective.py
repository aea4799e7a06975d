"""Warnings about options that change nothing, which name the line of the user's program that gave them."""

import inspect
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from protocol.ineffective import declared, without_effect


class IneffectiveOption(UserWarning):
    """An option was given that changes nothing beside the others."""


def warn(sentence: str) -> None:
    """An IneffectiveOption warning at the first line outside the package, unless the sentence is empty."""
    if sentence:
        warnings.warn(sentence, IneffectiveOption, _caller_level())


def warn_ineffective(options: msgspec.Struct, plain: Mapping[str, Any] = MappingProxyType({})) -> None:
    """A warning for each field that changes nothing and has another value than its default and its `plain` one."""
    values, defaults = msgspec.structs.asdict(options), msgspec.structs.asdict(type(options)())
    for name, declarations in declared(type(options)).items():
        if values[name] not in (defaults[name], plain.get(name)):
            warn(without_effect(name, declarations, values))


def _caller_level() -> int:
    """The `stacklevel` by which `warnings.warn`, in the function that calls this, names that line."""
    level = 1
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    return level
