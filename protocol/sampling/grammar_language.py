"""Grammars in llguidance's language (its docs/syntax.md). Pure; imports nothing of the library."""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.messages.grammar import Calls, Form, Grammar, Json, OneOf, Part, Several, Text
from protocol.sampling.schema_bounds import Schema, SchemaError, parsed

PartT = TypeVar("PartT", Json, Text)
_WHITESPACE = r"(\n[ \t]{0,32}| )"
"""Whitespace allowed between JSON tokens. Without a bound, an uncertain model can generate line breaks forever."""


def lark(grammar: Grammar) -> str:
    """The whole grammar. Raises SchemaError."""
    calls, rules = grammar.calls, _Rules()
    if calls is None:
        answer = rules.form((Json(grammar.schema),))
    else:
        form = rules.one_of(calls.forms)
        again = f"({rules.form(calls.separator)} {rules.form(calls.start)} {form})*" if calls.repeats else ""
        rest = f"{form} {again} {rules.form(calls.closing)}"
        if calls.optional:
            answer = f"({_head(calls, rules)} {rest})* {rules.text(Text())}"
        else:
            answer = f"{rules.form(calls.opening)} {rules.form(calls.start)} {rest}"
            if grammar.schema:
                answer = f"({rules.form((Json(grammar.schema),))} | {answer})"
    if grammar.thought is not None and not grammar.optional:
        # Models write line breaks between a thought and the answer.
        answer = rf"(/[ \t\r\n]{{1,8}}/)? {answer}"
    return "\n".join([*rules.lines, f"start: {answer}"])


class _Rules:
    """Parts of a grammar as expressions. What needs a name is defined in `lines`."""

    def __init__(self) -> None:
        self.lines = ["ANY: /(.|\\n)*/"]
        self._names: dict[Json | Text, str] = {}

    def one_of(self, forms: Sequence[Form]) -> str:
        some = " | ".join(self.form(form) for form in forms if form)
        # A group without content can't be written.
        return f"({some}){'?' if () in forms else ''}" if some else ""

    def form(self, parts: Form) -> str:
        return " ".join(map(self._part, parts))

    def text(self, part: Text) -> str:
        """Greedy, or up to the end. A lazy lexeme ends at the first occurrence of its literal."""
        name = self._named(part, _text)
        return name if part.token is None else f"({name.upper()} <[{part.token}]> | {name})"

    def _part(self, part: Part) -> str:
        match part:
            case str():
                return json.dumps(part)
            case int():
                return f"<[{part}]>"
            case Json():
                return self._named(part, _value)
            case Text():
                return self.text(part)
            case OneOf():
                return self.one_of(part.forms)
            case Several():
                form = self.form(part.form)
                return f"({form} ({self.form(part.separator)} {form})*)?"

    def _named(self, part: PartT, definition: Callable[[str, PartT], Sequence[str]]) -> str:
        if part not in self._names:
            self._names[part] = name = f"part{len(self._names)}"
            self.lines += definition(name, part)
        return self._names[part]


def _value(name: str, value: Json) -> Sequence[str]:
    return [f"{name}: %json {json.dumps(with_options(parsed(value.schema)))}"]


def _text(name: str, text: Text) -> Sequence[str]:
    body = " & ".join(["ANY", *(f"~(ANY {json.dumps(never)} ANY)" for never in text.never)])
    end = f" {json.dumps(text.end)}" if text.end else ""
    return [f"{name.upper()}: {body}", f"{name}{'[lazy]' if end else ''}: {name.upper()}{end}"]


def _head(calls: Calls, rules: _Rules) -> str:
    """Any text up to and with the beginning of a call. Raises SchemaError."""
    first, *rest = *calls.opening, *calls.start, ""
    if not isinstance(first, str | int):
        raise SchemaError("optional calls must begin with a fixed text")
    letters = calls.letters if isinstance(first, int) else first
    trigger = letters.rstrip()
    if not trigger:
        raise SchemaError("optional calls need a text before them")
    behind = (letters[len(trigger) :],) if trigger != letters else ()
    token = f"{rules.text(Text())} {rules.form((first,))} | " if isinstance(first, int) else ""
    # TEXT can't contain the trigger, at which its lexeme would end.
    return f"({token}{rules.form((Text(trigger), *behind))}) {rules.form(tuple(rest[:-1]))}"


def with_options(schema: Schema) -> Schema:
    """The schema with llguidance's options that the client may not choose."""
    if isinstance(schema, bool):
        return schema
    given = schema.get("x-guidance")
    options = {**(given if isinstance(given, dict) else {}), "whitespace_pattern": _WHITESPACE}
    return {**schema, "x-guidance": options}
