"""Grammars of calls of a request's functions: demanded, optional, or instead of a value. Pure.

Where arguments are not JSON, a grammar knows fewer keywords of schemas. Others are refused for strict functions, and
skipped for the rest.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from orchestrator.text.answer.parameters import ALL_TYPES, ANY_OBJECT, Function, Parameters, json_schema
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.messages.base import MAX_SCHEMA
from protocol.messages.grammar import Calls, Form, Grammar, Json, OneOf, Several, Text
from protocol.sampling.schema_bounds import MOST_LEVELS

Functions: TypeAlias = Sequence[Function]
_LONGEST_NAME = 256
_MOST_CALLS = 64
"""Of one answer, in a syntax that numbers them."""


class Marks:
    """Those that are tokens of the model stand in a grammar as tokens, others as letters."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._pattern = re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None

    @classmethod
    def of(cls, markers: Sequence[str], codec: TextCodec) -> "Marks":
        ids = {marker: codec.id_of(marker) for marker in markers}
        return cls({marker: token for marker, token in ids.items() if token is not None})

    def form(self, text: str) -> Form:
        """`text` with the tokens in it."""
        pieces = self._pattern.split(text) if self._pattern else [text]
        return tuple(self.tokens.get(piece, piece) for piece in pieces if piece)

    def text_up_to(self, end: str, never: Sequence[str] = ()) -> Text:
        """Any text and the marker `end`. `never`: what would end it too."""
        return Text(end, self.tokens.get(end), tuple(never))


_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
_OF_LISTS = ("prefixItems", "minItems", "maxItems", "uniqueItems", "contains")
_OF_NAMES = ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas")
_OF_OBJECTS = ("anyOf", "oneOf", "allOf", "not", "if", "minProperties", "maxProperties", *_OF_NAMES)


class JsonArguments:
    """A JSON object."""

    def form(self, parameters: Parameters, marks: Marks) -> Form:
        return (Json(parameters.json_schema()),)


class Fields(NamedTuple):
    """Each argument between markers, in the schema's order. Texts have no quotes; other values are JSON."""

    before: str
    behind: str
    """What stands around the name."""
    end: str
    """Ends a value."""
    gap: str = ""
    """Before `end`, where the value is not any text."""
    after: str = ""
    """Behind `end`."""
    never: tuple[str, ...] = ()
    """Markers beside `end` that would end a text."""

    def form(self, parameters: Parameters, marks: Marks) -> Form:
        parameters.refuse("parameters", parameters.schema, _OF_OBJECTS)
        fields: list[Any] = []
        for name, schema, required in parameters.members():
            field = (*marks.form(self.before), name, *marks.form(self.behind))
            field += self._value(name, schema, parameters, marks)
            fields += field if required else [_perhaps(field)]
        return tuple(fields)

    def _value(self, name: str, schema: Any, parameters: Parameters, marks: Marks) -> Form:
        closing = marks.form(self.gap + self.end + self.after)
        types, choices = parameters.types(schema), parameters.choices(schema)
        if "string" not in types:
            return (Json(parameters.json_schema(schema)), *closing)
        if choices is not None:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in choices]
            return (OneOf(tuple((text,) if text else () for text in texts)), *closing)
        # Any text is one of the types, but what is read as another value may not fit its schema.
        parameters.refuse(
            name, schema, (*_OF_TEXTS, *(("type", "anyOf", "oneOf") if types & {"object", "array"} else ()))
        )
        return (marks.text_up_to(self.end, self.never), *marks.form(self.after))


class PythonArguments:
    """Keyword arguments, as in Python. Values are JSON."""

    def form(self, parameters: Parameters, marks: Marks) -> Form:
        parameters.refuse("parameters", parameters.schema, _OF_OBJECTS)
        members = [
            ((_word(name, parameters) + "=", Json(parameters.json_schema(schema))), required)
            for name, schema, required in parameters.members()
        ]
        return ("(", *_listed(members, ", "), ")")


class BareObject(NamedTuple):
    """An object whose names have no quotes and whose texts are between markers, as Gemma's models write it."""

    quote: str
    never: tuple[str, ...] = ()
    """Markers beside `quote` that would end a text."""
    flat: bool = False
    """Objects and lists in it can't be read."""

    def form(self, parameters: Parameters, marks: Marks) -> Form:
        return self._object(parameters.schema, "parameters", parameters, marks, 0)

    def _object(self, schema: Any, name: str, parameters: Parameters, marks: Marks, level: int) -> Form:
        parameters.refuse(name, schema, _OF_OBJECTS)
        members: list[tuple[Form, bool]] = []
        # The models' templates sort the names.
        for name, one, required in sorted(parameters.members(schema), key=lambda member: member.name):
            value = self._value(one, name, parameters, marks, level + 1)
            members.append(((_word(name, parameters) + ":", *value), required))
        return ("{", *_listed(members, ","), "}")

    def _value(self, schema: Any, name: str, parameters: Parameters, marks: Marks, level: int) -> Form:
        if level > MOST_LEVELS or parameters.spent:
            raise InputError(f"The schema in tools is nested deeper than {MOST_LEVELS} levels, or in too many ways.")
        schema, choices = parameters.resolved(schema), parameters.choices(schema)
        if choices is not None:
            return (OneOf(tuple(self._choice(value, marks) for value in choices)),)
        several = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(several, list):
            return (OneOf(tuple(self._value(one, name, parameters, marks, level + 1) for one in several)),)
        return (OneOf(tuple(self._of_types(schema, name, parameters, marks, level))),)

    def _choice(self, value: Any, marks: Marks) -> Form:
        if not isinstance(value, str):
            return (json.dumps(value),)
        quote = marks.form(self.quote)
        return (*quote, *((value,) if value else ()), *quote)

    def _of_types(self, schema: Any, name: str, parameters: Parameters, marks: Marks, level: int) -> Sequence[Form]:
        types = parameters.types(schema)
        forms: list[Form] = []
        if "string" in types:
            parameters.refuse(name, schema, _OF_TEXTS)
            forms.append((*marks.form(self.quote), marks.text_up_to(self.quote, self.never)))
        if types == ALL_TYPES:
            return [*forms, (Json("true"),)] if not self.flat else forms
        if types & {"object", "array"} and self.flat:
            raise InputError(
                f"{name!r} of {parameters.function!r} may be an object or a list, which this model can't write."
            )
        if "object" in types:
            known = parameters.members(schema)
            forms.append(
                self._object(schema, name, parameters, marks, level) if known else (Json('{"type": "object"}'),)
            )
        if "array" in types:
            parameters.refuse(name, schema, _OF_LISTS)
            item = self._value(schema.get("items", {}), name, parameters, marks, level + 1)
            forms.append(("[", Several(item, (",",)), "]"))
        if plain := types - {"string", "object", "array"}:
            forms.append((Json(parameters.json_schema({**schema, "type": sorted(plain)})),))
        return forms


def _word(name: str, parameters: Parameters) -> str:
    if not name.isidentifier():
        raise InputError(f"The parameter {name!r} of {parameters.function!r} has a name that this model can't write.")
    return name


def _perhaps(form: Form) -> OneOf:
    return OneOf((form, ()))


def _listed(members: Sequence[tuple[Form, bool]], separator: str) -> Form:
    """Members in their order, those that are required and perhaps others, with `separator` between them."""
    first = next((place for place, (_, required) in enumerate(members) if required), None)
    if first is None:
        # Whichever comes first has no separator before it.
        heads = [(*form, *_behind(members[place + 1 :], separator)) for place, (form, _) in enumerate(members)]
        return (OneOf((*heads, ())),) if heads else ()
    before = [_perhaps((*form, separator)) for form, _ in members[:first]]
    return (*before, *members[first][0], *_behind(members[first + 1 :], separator))


def _behind(members: Sequence[tuple[Form, bool]], separator: str) -> Form:
    parts: list[Any] = []
    for form, required in members:
        parts += (separator, *form) if required else [_perhaps((separator, *form))]
    return tuple(parts)


ArgumentsWriter: TypeAlias = JsonArguments | Fields | PythonArguments | BareObject
"""One way to write the arguments of a call. `form` raises InputError for parameters that can't be enforced."""


class Style(NamedTuple):
    """How one model writes calls."""

    arguments: ArgumentsWriter | None = JsonArguments()
    """None: a call is a JSON object with the name and the arguments."""
    opening: str = ""
    start: str = ""
    before: str = ""
    behind: str = ""
    """What stands around the name of the function, before its arguments."""
    quoted: bool = False
    """The name is a JSON string."""
    after: str = ""
    separator: str = ""
    closing: str = ""
    numbered: bool = False
    """Behind the name stands the number of the call, from 0."""


class StyledCalls:
    """Makes grammars of calls of a style, in a model with these markers. All methods raise InputError."""

    def __init__(self, style: Style, marks: Marks) -> None:
        self._style = style
        self._marks = marks

    def demanded(self, functions: Functions, *, several: bool) -> Grammar:
        """Calls and nothing else: one, or several."""
        return Grammar("", self._calls(functions, repeats=several))

    def optional(self, functions: Functions) -> Grammar:
        """Any text, and calls in it if the model likes."""
        # Optional calls come behind any text, each of them. Only behind an opening do they follow one another.
        return Grammar("", self._calls(functions, repeats=bool(self._style.opening), optional=True))

    def or_value(self, functions: Functions, schema: str, *, several: bool) -> Grammar:
        """Calls and nothing else, or a JSON value."""
        if (self._style.opening or self._style.start).startswith("{"):
            raise InputError("This model's calls are JSON too: leave out tools or response_format.")
        return Grammar(schema, self._calls(functions, repeats=several))

    def _calls(self, functions: Functions, *, repeats: bool, optional: bool = False) -> Calls:
        require_small(functions)
        style, marks = self._style, self._marks
        forms = [self._whole(functions)] if style.arguments is None else [self._form(one) for one in functions]
        return bounded(
            Calls(
                tuple((*form, *marks.form(style.after)) for form in forms),
                *map(marks.form, (style.opening, style.start, style.separator, style.closing)),
                repeats=repeats,
                optional=optional,
                letters=next((mark for mark in marks.tokens if (style.opening or style.start).startswith(mark)), ""),
            )
        )

    def _form(self, function: Function) -> Form:
        style, marks, name = self._style, self._marks, function["name"]
        assert style.arguments is not None
        return (
            *marks.form(style.before),
            json.dumps(name) if style.quoted else name,
            *((OneOf(tuple((f":{number}",) for number in range(_MOST_CALLS))),) if style.numbered else ()),
            *marks.form(style.behind),
            *style.arguments.form(Parameters(function), marks),
        )

    def _whole(self, functions: Functions) -> Form:
        lenient = not any(function.get("strict") for function in functions)
        whole = {"anyOf": [_whole_call(place, function) for place, function in enumerate(functions)]}
        return (Json(json_schema(whole, lenient=lenient)),)


def require_small(functions: Functions) -> None:
    """Raises InputError for schemas longer than a grammar may be, before anything is made of them."""
    try:
        size = len(json.dumps([function.get("parameters") for function in functions]))
    except RecursionError as error:
        raise InputError("The schema in tools is nested too deeply.") from error
    if size > MAX_SCHEMA:
        raise InputError(f"The schema in tools has {size:,} characters; the limit is {MAX_SCHEMA:,}.")


def bounded(calls: Calls) -> Calls:
    """Raises InputError for more than a grammar may hold."""
    size = sum(map(_size, (*calls.forms, calls.opening)))
    if size > MAX_SCHEMA:
        raise InputError(f"The schema in tools has {size:,} characters; the limit is {MAX_SCHEMA:,}.")
    return calls


def _size(form: Form) -> int:
    """Characters of schemas and of names and values, which are all that a request makes long."""
    size = 0
    for part in form:
        match part:
            case Json():
                size += len(part.schema)
            case str():
                size += len(part)
                if len(part) > _LONGEST_NAME:
                    raise InputError(
                        f"A name or value in tools has {len(part):,} characters; the limit is {_LONGEST_NAME}."
                    )
            case OneOf():
                size += sum(map(_size, part.forms))
            case Several():
                size += _size(part.form)
            case _:
                size += 1
    return size


def _whole_call(place: int, function: Function) -> Mapping[str, Any]:
    parameters = function.get("parameters") or ANY_OBJECT
    arguments = _relocated(parameters, f"#/anyOf/{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _relocated(schema: Any, root: str, level: int = 0) -> Any:
    """The schema as part of another one: its references to itself begin with `root`."""
    if level > MOST_LEVELS:
        raise InputError(f"The schema in tools is nested deeper than {MOST_LEVELS} levels.")
    if isinstance(schema, list | tuple):
        return [_relocated(one, root, level + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: root + value.removeprefix("#")
        if name == "$ref" and isinstance(value, str) and value.startswith(("#", "/"))
        else _relocated(value, root, level + 1)
        for name, value in schema.items()
    }
