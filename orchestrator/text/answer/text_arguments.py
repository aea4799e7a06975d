"""Reads calls whose arguments are texts between marks, and the texts as what their schemas say. Pure."""

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from orchestrator.text.answer.call_stream import LONGEST_HEADER, OBJECT, WHOLE_JSON, CallForm
from orchestrator.text.answer.parameters import ALL_TYPES, Function, Parameters, Types, type_of

_LONGEST_SPACE = 256
"""Before a mark, in characters."""
_CDATA = r"(?:(?P<cdata>\s*<!\[CDATA\[)|(?=\s*(?:[^\s<]|<[^!]|<![^\[])))"


class TextForm(NamedTuple):
    """How one model writes such calls."""

    head: str
    """A pattern of what comes first, with the `name` of the function."""
    begin: str
    """Begins an argument."""
    field: str
    """A pattern of what follows it before the text, with the `name` of the argument."""
    end: str
    """Behind an argument."""
    gap: str = ""
    """Around a text."""
    apart: str = r"\n[ \t]*"
    """A pattern of what comes before an argument if `end` is missing."""
    cdata: bool = False
    """A text may be in a CDATA section."""

    @property
    def forms(self) -> tuple[CallForm, ...]:
        """These models also write JSON."""
        header = re.compile(rf"{self.head}(?=\s*{re.escape(self.begin)})")
        texts = CallForm(header, arguments=partial(TextFields, self), alone=self.begin)
        return (texts, CallForm(re.compile(self.head + OBJECT)), WHOLE_JSON)


class TextFields:
    """Arguments between marks. A text is certain while it is written, another value at its end.

    A text may have marks in it: it ends where another argument begins that is new, behind `end`, or without one if the
    function declares it.
    """

    def __init__(self, form: TextForm, function: Function, last: str) -> None:
        """`last`: the marker behind the call."""
        self._form = form
        self._last = last
        self._parameters = Parameters(function)
        members = self._parameters.members()
        self._declared = {name for name, _, _ in members}
        self._needed = {name for name, _, required in members if required}
        begin = re.escape(form.begin)
        gap = rf"(?:{re.escape(form.gap)}|(?=.))" if form.gap else ""
        self._field = re.compile(rf"\s*{begin}{form.field}{_CDATA if form.cdata else gap}", re.DOTALL)
        self._apart = rf"{form.apart}(?={begin})"
        self._end = form.end
        """Of the value at hand."""
        self._given: set[str] = set()
        self._held = ""
        self._name: str | None = None
        """Of the argument at hand; None between two."""
        self._types = ALL_TYPES
        self._sent = False
        """The beginning of its text is."""
        self._searched = 0
        """Characters in `_held` behind which a mark may end it."""
        self.rest: str | None = None

    def push(self, text: str) -> str:
        self._held += text
        written: list[str] = []
        while (piece := self._between() if self._name is None else self._value()) is not None:
            written.append(piece)
        return "".join(written)

    def close(self, *, marked: bool) -> str:
        written = ""
        if self._name is not None:
            found = self._stop()
            if found or marked:
                written = self._ended(found)
            else:
                value, self._held = self._held.removesuffix(self._form.gap), ""
                written = self._text(value) if self._is_text(value) else self._named(value)
        self.rest = self._held
        ended = self._needed <= self._given and self._last.startswith(self.rest.strip())
        complete = self._name is None and (marked or ended)
        return written + ("" if self._given else "{") + "}" if complete else written

    def _between(self) -> str | None:
        found = self._field.match(self._held[:LONGEST_HEADER])
        if found is None:
            return None
        self._name, self._held, self._sent, self._searched = found["name"], self._held[found.end() :], False, 0
        self._types = self._parameters.types(self._parameters.of(found["name"]))
        self._end = ("]]>" if found.groupdict().get("cdata") else "") + self._form.end
        return ""

    def _stop(self) -> re.Match[str] | None:
        return re.compile(f"{re.escape(self._end)}|{self._apart}").search(self._held, self._searched)

    def _value(self) -> str | None:
        """The next piece of the value; None if that is not certain yet."""
        while found := self._stop():
            ends = self._ends(found)
            if ends is None:
                break
            if ends:
                return self._ended(found)
            self._searched = max(found.end(), found.start() + 1)
        if not found:
            longest = max(len(self._end), len(self._form.begin))
            certain = self._held[:-longest]
            self._searched = max(self._searched, len(certain.rstrip()), len(certain) - _LONGEST_SPACE)
        safe = self._held[: found.start() if found else self._searched].rstrip()
        if not safe or not self._is_text(safe):
            return None
        self._held, self._searched = self._held[len(safe) :], max(0, self._searched - len(safe))
        return self._text(safe)

    def _is_text(self, value: str) -> bool:
        """Whether the value that begins so is a text."""
        null = "null" in self._types and "null".startswith(value)
        return self._sent or (self._types in ({"string"}, {"string", "null"}) and not null)

    def _ends(self, found: re.Match[str]) -> bool | None:
        """Whether a mark ends the value. None if what follows must tell."""
        behind = self._held[found.end() :]
        if following := self._field.match(behind[:LONGEST_HEADER]):
            new = following["name"] not in self._given | {self._name}
            return new and (found[0] == self._end or following["name"] in self._declared)
        behind = behind.lstrip()
        if behind.startswith(self._form.begin):
            return None if len(behind) < LONGEST_HEADER else False
        last = found[0] == self._end and self._last.startswith(behind)
        return None if last or self._form.begin.startswith(behind) else False

    def _ended(self, found: re.Match[str] | None) -> str:
        """The rest of the value, which ends at a mark."""
        value = (self._held[: found.start()] if found else self._held.rstrip()).removesuffix(self._form.gap)
        self._held = self._held[found.end() :] if found else ""
        read = value if self._sent else read_text(value, self._types)
        written = self._text(value) + '"' if isinstance(read, str) else self._named(_json(read))
        self._given.add(self._name or "")
        self._name = None
        return written

    def _text(self, text: str) -> str:
        written = _json(text)[1:-1]
        if self._sent:
            return written
        self._sent = True
        return self._named(f'"{written}')

    def _named(self, value: str) -> str:
        return f"{',' if self._given else '{'}{_json(self._name)}:{value}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_text(text: str, types: Types) -> Any:
    """The text as a value of one of the types; if it is none, the text itself.

    Where it may be a text, it is another value only if it says exactly this: `5` and not `05`, `5.0` or `5e0`. A
    schema that says nothing takes numbers and booleans for texts.
    """
    if "string" in types:
        found = _value(json.loads, text)
        wanted = frozenset(("object", "array", "null")) if types == ALL_TYPES else types
        kinds = frozenset(("number",)) if isinstance(found, float) else type_of(found) - {"string"}
        exact = isinstance(found, dict | list) or json.dumps(found) == text
        return found if exact and kinds & wanted else text
    bare = text.strip()
    for found in (_value(json.loads, bare), _value(ast.literal_eval, _CONSTANTS.get(bare.lower(), bare))):
        if type_of(found) & types:
            whole = isinstance(found, float) and "number" not in types and abs(found) < 1 << 53
            return int(found) if whole else found
    return text


_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}


def _value(read: Callable[[str], Any], text: str) -> Any:
    """The text itself if it is no value of JSON."""
    try:
        return json.loads(json.dumps(read(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
