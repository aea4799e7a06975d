"""Reads calls whose arguments are texts between marks, and the texts as what their schemas say. Pure."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from orchestrator.text.answer.parameters import ALL_TYPES, Function, Parameters, Types, type_of

_JSON_CALL = re.compile(r"\s*(?P<name>[\w.-]*)\s*(?P<json>\{.*\})\s*", re.DOTALL)
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


class TextForm(NamedTuple):
    """How one model writes such calls."""

    head: str
    """A pattern of what comes first, with the `name` of the function."""
    field: str
    """A pattern of what begins an argument, with its `name`."""
    end: str
    """Behind an argument."""
    close: str = ""
    """Behind the last one, if it is not the end of the call."""
    gap: str = ""
    """Around a text."""
    apart: str = r"\n[ \t]*"
    """A pattern of what comes before an argument if `end` is missing."""
    cdata: bool = False
    """A text may be in a CDATA section."""

    def call(self, content: str, functions: Mapping[str, Function]) -> Mapping[str, Any]:
        """The name and the arguments. Raises ValueError for what is no call."""
        if found := _JSON_CALL.fullmatch(content):
            value = json.loads(found["json"])
            return {"name": found["name"], "arguments": value} if found["name"] else value
        body = content.rstrip().removesuffix(self.close)
        head = re.match(self.head, body)
        if head is None:
            raise ValueError("the call names no function")
        parameters = Parameters(functions.get(head["name"], {"name": head["name"]}))
        texts = self._texts(body, head.end(), {one.name for one in parameters.members()})
        arguments = {name: read_text(text, parameters.types(parameters.of(name))) for name, text in texts}
        return {"name": head["name"], "arguments": arguments}

    def _texts(self, body: str, place: int, declared: set[str]) -> Iterator[tuple[str, str]]:
        """Names and texts. A text may have marks in it: it ends where another argument begins that is new, behind
        `end`, or without one if it is `declared`."""
        start = re.compile(rf"\s*{self.field}").match(body, place)
        if start is None and body[place:].strip():
            raise ValueError("the call has other text")
        begins = re.compile(rf"(?:(?P<end>{re.escape(self.end)})\s*|{self.apart}){self.field}")
        starts = {} if start is None else {start["name"]: start}
        for after in begins.finditer(body, start.end() if start else len(body)):
            if after["name"] not in starts and (after["end"] or after["name"] in declared):
                starts[after["name"]] = after
        for (name, start), after in zip_longest(starts.items(), [*starts.values()][1:]):
            text = body[start.end() : after.start()] if after else body[start.end() :].rstrip().removesuffix(self.end)
            if self.cdata and (section := _CDATA.fullmatch(text)):
                text = section[1]
            yield name, text.removeprefix(self.gap).removesuffix(self.gap)


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
