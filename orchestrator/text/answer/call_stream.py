"""Calls as they are written: a call begins when its name is certain, and its arguments follow piece by piece. Pure.

What was sent stays: if the output ends in a call, or the model writes no JSON, the arguments are what it wrote.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from orchestrator.text.answer.parameters import ALL_TYPES, Parameters
from orchestrator.text.stop_scanner import StopScanner

LONGEST_HEADER = 512
OBJECT = r"\s*(?=\{\s*[\"}])"
"""What comes before arguments that begin as a JSON object."""


class FieldMarks(NamedTuple):
    """How arguments stand between markers."""

    field: re.Pattern[str]
    """All before a value, with its `key`."""
    begin: str
    """The beginning of `field`."""
    end: str
    """Ends a value."""
    space: str | None = None
    """What is dropped at a value's end; None for any white space."""


class CallForm(NamedTuple):
    """How a call begins and ends."""

    header: re.Pattern[str]
    """All before the arguments, with the `name` and perhaps an `id`."""
    tail: str = ""
    """An expression for what is dropped behind the arguments."""
    fields: tuple[FieldMarks, ...] = ()
    """Ways to write an argument; none: the arguments are a JSON object."""


def json_header(before: str, arguments: str = "arguments") -> re.Pattern[str]:
    """Of a call that is a JSON object, from behind `before` on. `arguments`: what they are called."""
    return re.compile(before + rf'\s*"(?P<name>[^"\\]*)"\s*,\s*"{arguments}"\s*:' + OBJECT)


class Translator(Protocol):
    """From a syntax to one whose arguments are JSON."""

    def push(self, text: str) -> str: ...
    def finish(self) -> str: ...


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
        """The text behind the object; None while that is incomplete."""

    def push(self, text: str) -> str:
        """The text of the object in `text`."""
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
        """What is missing at the end of a call. `marked`: it has its end marker."""
        self.rest = ""
        complete = marked and not self._quoted
        return self._word() + "".join(reversed(self._closing)) if complete else self._plain

    def _word(self) -> str:
        word, self._plain = self._plain, ""
        return word if not word or _PLAIN.fullmatch(word) else _PYTHON.get(word) or json.dumps(word, ensure_ascii=False)


class TextFields:
    """Arguments between markers, as a JSON object. A text is certain while it is written, another value at its end."""

    def __init__(
        self, marks: Sequence[FieldMarks], last: str, function: Mapping[str, Any], read: Callable[[str], str | None]
    ) -> None:
        """`last`: the marker behind the call. `read`: from one argument with its markers to a JSON object."""
        parameters = Parameters(function)
        members = parameters.members()
        self._all = marks
        self._last = last
        self._marks = marks[0]
        """Of the argument at hand."""
        self._read = read
        self._types = {name: parameters.types(schema) for name, schema, _ in members}
        self._needed = {name for name, _, required in members if required}
        self._given: set[str] = set()
        self._held = ""
        self._key: str | None = None
        """Of the value at hand; None between two."""
        self._opening = ""
        """What stands before it."""
        self._sent = False
        """Its beginning is."""
        self._searched = 0
        """Characters in `_held` without a marker that ends it."""
        self.rest: str | None = None

    def push(self, text: str) -> str:
        self._held += text
        written: list[str] = []
        while self.rest is None and (piece := self._value() if self._key is not None else self._between()) is not None:
            written.append(piece)
        return "".join(written)

    def close(self, *, marked: bool) -> str:
        written = ""
        if self._key is not None:
            found = self._next_stop()
            if marked or found:
                written = self._ended(*(found.span() if found else (len(self._held), len(self._held))))
            else:
                places = range(self._searched, len(self._held))
                marker = next((place for place in places if self._marks.end.startswith(self._held[place:])), None)
                value, self._held = self._trimmed(self._held[:marker]), ""
                written = self._text(value) if self._streams(value) else self._named(value)
        self.rest = self._held
        ended = self._needed <= self._given and self._last.startswith(self.rest.strip())
        complete = self._key is None and (marked or ended)
        return written + self._before(complete) if complete else written

    def _next_stop(self) -> re.Match[str] | None:
        """What may end the value."""
        stops = f"{re.escape(self._marks.end)}|{re.escape(self._marks.begin)}"
        return re.compile(stops).search(self._held, self._searched)

    def _before(self, last: bool = False) -> str:
        """What stands before the next argument, or at the end."""
        return ("" if self._given else "{") + "}" if last else ("," if self._given else "{")

    def _between(self) -> str | None:
        for marks in self._all:
            found = marks.field.match(self._held[:LONGEST_HEADER])
            if found is None:
                continue
            self._marks = marks
            self._key, self._opening, self._held = found["key"], found[0], self._held[found.end() :]
            self._sent, self._searched = False, 0
            return ""
        return None

    def _value(self) -> str | None:
        """The next piece of the value; None if that is not certain yet."""
        while found := self._next_stop():
            ends = self._ends(found)
            if ends is None:
                break
            if ends:
                return self._ended(*found.span())
            self._searched = found.end()
        if not found:
            # A marker may have begun.
            self._searched = max(
                self._searched, len(self._held) - max(len(self._marks.end), len(self._marks.begin)) + 1
            )
        safe = self._trimmed(self._held[: found.start() if found else self._searched])
        if not safe or not self._streams(safe):
            return None
        self._held = self._held[len(safe) :]
        self._searched -= len(safe)
        return self._text(safe)

    def _streams(self, value: str) -> bool:
        """Whether the value that begins so is a text."""
        types = self._types.get(self._key or "", ALL_TYPES)
        null = "null" in types and "null".startswith(value.lower())
        return self._sent or (types in ({"string"}, {"string", "null"}) and not null)

    def _ends(self, found: re.Match[str]) -> bool | None:
        """Whether a marker ends the value; it may be part of a text. None if what follows must tell."""
        marks, behind = self._marks, self._held[found.end() :].lstrip()
        if found[0] == marks.begin:
            field = marks.field.match(self._held[found.start() :][:LONGEST_HEADER])
            if field is None:
                return False if len(behind) > LONGEST_HEADER else None
            return field["key"] in self._types.keys() - self._given - {self._key}
        if behind.startswith(marks.begin):
            return True
        return None if marks.begin.startswith(behind) or self._last.startswith(behind) else False

    def _ended(self, start: int, end: int) -> str:
        """The rest of the value, which ends at `start`, before a marker up to `end`."""
        marker, value = self._held[start:end], self._trimmed(self._held[:start])
        self._held = self._held[start if marker == self._marks.begin else end :]
        read = None if self._sent else self._read(self._opening + value + self._marks.end)
        written = self._text(value) + '"' if read is None else self._before() + read[1:-1]
        self._given.add(self._key or "")
        self._key = None
        return written

    def _text(self, text: str) -> str:
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        if not self._sent:
            self._sent = True
            return self._named('"' + written)
        return written

    def _named(self, value: str) -> str:
        return f"{self._before()}{json.dumps(self._key, ensure_ascii=False)}:{value}"

    def _trimmed(self, value: str) -> str:
        return value.rstrip() if self._marks.space is None else value.removesuffix(self._marks.space)


class QuotedTexts:
    """Texts between markers become JSON's, and `outside` changes what stands between them."""

    def __init__(self, quote: str, outside: Callable[[str], str] = str) -> None:
        self._scanner = StopScanner([quote])
        self._outside = outside
        self._held = ""
        self.inside = False

    def push(self, text: str) -> str:
        written: list[str] = []
        found = True
        while found:
            before, found = self._scanner.push(text)
            text = self._scanner.rest
            if self.inside:
                written.append(json.dumps(before, ensure_ascii=False)[1:-1])
            else:
                self._held += before
            if found:
                written += ('"',) if self.inside else (self.finish(), '"')
                self.inside = not self.inside
        return "".join(written)

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = self._held + self._scanner.flush(), ""
        return self._outside(held)
