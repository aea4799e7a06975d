"""Calls as they are written: a call begins when its name is certain, and its arguments follow piece by piece. Pure.

What was sent stays: if the output ends in a call, or the model writes no JSON, the arguments are what it wrote.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from orchestrator.text.answer.parameters import Function
from orchestrator.text.stop_scanner import StopScanner

LONGEST_HEADER = 512
OBJECT = r"\s*(?=\{\s*[\"}])"
"""What comes before arguments that begin as a JSON object."""


class ArgumentsReader(Protocol):
    """Reads the arguments of one call, as a JSON object."""

    rest: str | None
    """The text behind them; None while they are incomplete."""

    def push(self, text: str) -> str:
        """What is certain now."""
        ...

    def close(self, *, marked: bool) -> str:
        """The end, where the call ends before its arguments do. `marked`: it has its end marker."""
        ...


_PLAIN = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class JsonObject:
    """Finds the end of an object. What is no JSON becomes it where it can: control characters in texts are escaped, and
    words become texts."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        """Brackets that are missing."""
        self._quoted = False
        self._escaped = False
        self._plain = ""
        """A number or a word that may go on."""
        self.rest: str | None = None

    def push(self, text: str) -> str:
        written: list[str] = []
        for place, letter in enumerate(text):
            if self._quoted:
                written.append(letter if letter >= " " else json.dumps(letter)[1:-1])
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
                continue
            if letter not in '{}[]",: \t\r\n':
                self._plain += letter
                continue
            written += (self._word(), letter)
            if letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._closing.append("}" if letter == "{" else "]")
            elif letter in "]}":
                self._closing.pop()
                if not self._closing:
                    self.rest = text[place + 1 :]
                    break
        return "".join(written)

    def close(self, *, marked: bool) -> str:
        self.rest = ""
        return self._word() + "".join(reversed(self._closing)) if marked and not self._quoted else self._plain

    def _word(self) -> str:
        word, self._plain = self._plain, ""
        return word if not word or _PLAIN.fullmatch(word) else _PYTHON.get(word) or json.dumps(word, ensure_ascii=False)


NewReader: TypeAlias = Callable[[Function, str], ArgumentsReader]
"""Makes a reader of the arguments of a function, from the marker behind the call."""


class CallForm(NamedTuple):
    """How a call begins and ends."""

    header: re.Pattern[str]
    """All before the arguments, with the `name` and perhaps an `id`."""
    tail: str = ""
    """A pattern of what is dropped behind the arguments."""
    arguments: NewReader = lambda *_: JsonObject()
    alone: str = ""
    """A call of the header alone has no arguments, if the header is complete with this behind it."""


def json_form(before: str, arguments: str = "arguments", tail: str = r"[}\s]*") -> CallForm:
    """A call that is a JSON object, from behind `before` on. `arguments`: what they are called."""
    return CallForm(re.compile(rf'{before}\s*"(?P<name>[^"\\]*)"\s*,\s*"{arguments}"\s*:{OBJECT}'), tail)


WHOLE_JSON = json_form(r'\s*\{\s*"name"\s*:')


class QuotedTexts:
    """Texts between markers become JSON's."""

    def __init__(self, quote: str) -> None:
        self._scanner = StopScanner([quote])
        self._inside = False

    def __call__(self, text: str) -> str:
        written = ""
        while True:
            before, found = self._scanner.push(text)
            written += json.dumps(before, ensure_ascii=False)[1:-1] if self._inside else before
            if not found:
                return written
            written, self._inside, text = written + '"', not self._inside, self._scanner.rest
