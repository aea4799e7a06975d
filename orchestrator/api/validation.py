"""What a validation error means for the user who gave the value. Pure."""

import re

import msgspec

from protocol.errors import InputError

_EXPECTED = re.compile(r"Expected (?P<what>.+?)(?:, got .+)? - at `\$\.(?P<path>[^`]+)`")
_UNKNOWN_CHOICE = re.compile(r"Invalid enum value (?P<value>.+) - at `\$\.(?P<path>[^`]+)`")
_UNKNOWN_NAME = re.compile(r"Object contains unknown field `(?P<name>[^`]+)`")
_WORDS = {"`float`": "a number", "`int`": "a whole number", "`str`": "text", "`array`": "a list"}


class InvalidValue(InputError):
    """An option has a value that it can't take. `field`: the option, if one is known."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


def out_of_range(error: msgspec.ValidationError) -> InvalidValue:
    """An error that names the option and what it may be, for instance "top_p must be a number > 0.0."."""
    text = str(error)
    found = _EXPECTED.fullmatch(text) or _UNKNOWN_CHOICE.fullmatch(text)
    return InvalidValue(_sentence(text), _name(found["path"]) if found else "")


def _sentence(text: str) -> str:
    if choice := _UNKNOWN_CHOICE.fullmatch(text):
        return f"{_name(choice['path'])} can't be {choice['value']}."
    if unknown := _UNKNOWN_NAME.fullmatch(text):
        return f"There is no option {unknown['name']!r}."
    found = _EXPECTED.fullmatch(text)
    if found is None:
        return f"{text}."
    what = found["what"]
    for kind, word in _WORDS.items():
        what = what.replace(kind, word)
    return f"{_name(found['path'])} must be {what}."


def _name(path: str) -> str:
    return path.split(".")[-1]
