"""What is said of values: of one that an option can't take, and of one that changes nothing."""

import inspect
import re
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from protocol.errors import InputError
from protocol.ineffective import declared, without_effect

_EXPECTED = re.compile(r"Expected (?P<what>.+?)(?:, got .+)? - at `\$\.(?P<path>[^`]+)`")
_UNKNOWN_CHOICE = re.compile(r"Invalid enum value (?P<value>.+) - at `\$\.(?P<path>[^`]+)`")
_UNKNOWN_NAME = re.compile(r"Object contains unknown field `(?P<name>[^`]+)`")
_WORDS = {"`float`": "a number", "`int`": "a whole number", "`str`": "text", "`array`": "a list"}


def out_of_range(error: msgspec.ValidationError) -> InputError:
    """An error that names the option and what it may be, for instance "top_p must be a number > 0.0."."""
    text = str(error)
    if choice := _UNKNOWN_CHOICE.fullmatch(text):
        return InputError(f"{_name(choice['path'])} can't be {choice['value']}.")
    if unknown := _UNKNOWN_NAME.fullmatch(text):
        return InputError(f"There is no option {unknown['name']!r}.")
    found = _EXPECTED.fullmatch(text)
    if found is None:
        return InputError(f"{text}.")
    what = found["what"]
    for kind, word in _WORDS.items():
        what = what.replace(kind, word)
    return InputError(f"{_name(found['path'])} must be {what}.")


def _name(path: str) -> str:
    return path.split(".")[-1]


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
