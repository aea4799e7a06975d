"""What a validation error means for the person who gave the value. Pure."""

import re

import msgspec

_EXPECTED = re.compile(r"Expected (?P<what>.+?)(?:, got .+)? - at `\$\.(?P<path>[^`]+)`")
_UNKNOWN_CHOICE = re.compile(r"Invalid enum value (?P<value>.+) - at `\$\.(?P<path>[^`]+)`")
_WORDS = {"`float`": "a number", "`int`": "a whole number", "`str`": "text", "`array`": "a list"}


def out_of_range(error: msgspec.ValidationError) -> str:
    """A sentence that names the value and what it may be, for instance "top_p must be a number > 0.0."."""
    if choice := _UNKNOWN_CHOICE.fullmatch(str(error)):
        return f"{_name(choice['path'])} can't be {choice['value']}."
    found = _EXPECTED.fullmatch(str(error))
    if found is None:
        return f"{error}."
    what = found["what"]
    for type, word in _WORDS.items():
        what = what.replace(type, word)
    return f"{_name(found['path'])} must be {what}."


def _name(path: str) -> str:
    return path.split(".")[-1]
