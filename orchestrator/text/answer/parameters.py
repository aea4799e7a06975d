"""The parameters of a function by its JSON schema, and the types that it allows. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from protocol.errors import InputError
from protocol.messages.base import MAX_SCHEMA
from protocol.sampling.schema_bounds import MOST_LEVELS

Function: TypeAlias = Mapping[str, Any]
"""A function of a request's tools: its name, and `parameters` that are a JSON schema, or none."""
Types: TypeAlias = frozenset[str]
"""Names of JSON's types. A number may be an integer."""
ALL_TYPES: Types = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
_MOST_RESOLVED = MAX_SCHEMA
"""Schemas that are looked at for one function, more than a text of the longest schema has without references. A schema
may name another one twice, that a third one twice, and so on."""


class Parameter(NamedTuple):
    """One parameter of a function, or one member of an object in it."""

    name: str
    schema: Any
    required: bool


class Parameters:
    """Of one function. Schemas may refer to parts of the function's own."""

    def __init__(self, function: Function) -> None:
        self.function: str = function["name"]
        self.schema: Mapping[str, Any] = function.get("parameters") or ANY_OBJECT
        self.strict = bool(function.get("strict"))
        self._resolved = 0
        self._characters = 0

    @property
    def spent(self) -> bool:
        """Whether so much of the schema was looked at that it must refer to itself in many ways."""
        return self._resolved > _MOST_RESOLVED

    def members(self, schema: Any = None) -> list[Parameter]:
        """Those that an object's schema names, in its order; without one those of the function."""
        schema = self.resolved(self.schema if schema is None else schema)
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping):
            return []
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list | tuple) else ()
        return [Parameter(name, one, name in needed) for name, one in properties.items()]

    def of(self, name: str) -> Any:
        """The schema of the parameter."""
        schema = self.resolved(self.schema)
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        return schema.get("additionalProperties")

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """`schema`, or what its reference names. Empty if there is no such schema."""
        self._resolved += 1
        for _ in range(MOST_LEVELS):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                break
            schema = self.schema
            for name in reference.removeprefix("#").split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def types(self, schema: Any, level: int = 0) -> Types:
        """The types that the schema allows; all of them if it says nothing."""
        if level > MOST_LEVELS or self.spent:
            return ALL_TYPES
        schema, types = self.resolved(schema), ALL_TYPES
        if isinstance(stated := schema.get("type"), str | list):
            types &= _union(_stated(name) for name in ([stated] if isinstance(stated, str) else stated))
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(values, list):
                types &= _union(map(type_of, values))
        for name in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(name), list):
                types &= _union(self.types(one, level + 1) for one in several)
        if isinstance(several := schema.get("allOf"), list):
            for one in several:
                types &= self.types(one, level + 1)
        return types

    def choices(self, schema: Any, level: int = 0) -> list[Any] | None:
        """The only values that the schema allows, if it lists them."""
        schema = self.resolved(schema)
        if "const" in schema:
            return [schema["const"]]
        if isinstance(values := schema.get("enum"), list):
            return values
        if schema.get("type") == "null":
            return [None]
        several = schema.get("anyOf") or schema.get("oneOf")
        if not isinstance(several, list) or level > MOST_LEVELS or self.spent:
            return None
        found = [self.choices(one, level + 1) for one in several]
        return None if None in found else [value for values in found for value in values or ()]

    def json_schema(self, schema: Any = None) -> str:
        """A schema that stands for itself, as text; without one that of all arguments. Keywords that a grammar does not
        know are skipped unless the function is strict. Raises InputError."""
        whole = self.schema if schema is None else schema
        if schema is not None and isinstance(schema, Mapping):
            whole = {**{name: self.schema[name] for name in _DEFINITIONS if name in self.schema}, **schema}
        text = json_schema(whole, lenient=not self.strict)
        # Each parameter's schema has all definitions.
        self._characters += len(text)
        if self._characters > MAX_SCHEMA:
            raise InputError(
                f"The schemas in the function {self.function!r} are too long: the limit is {MAX_SCHEMA:,} characters."
            )
        return text

    def refuse(self, name: str, schema: Any, keywords: Iterable[str]) -> None:
        """Raise InputError for a strict function whose schema has one of these keywords."""
        for keyword in keywords if self.strict else ():
            if keyword in self.resolved(schema):
                raise InputError(
                    f"The schema of {name!r} in the strict function {self.function!r} can't be enforced in this "
                    f"model's calls: leave out {keyword}, or strict."
                )


def json_schema(schema: Any, *, lenient: bool) -> str:
    """As text. Raises InputError."""
    # OpenAI enforces only strict schemas; a lenient grammar accepts many schemas that a strict one refuses.
    try:
        return json.dumps({**schema, "x-guidance": {"lenient": True}} if lenient and schema is not True else schema)
    except RecursionError as error:
        raise InputError("The schema in tools is nested too deeply.") from error


_NAMES = {type(None): "null", bool: "boolean", str: "string", list: "array"}


def type_of(value: Any) -> Types:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return frozenset(("integer", "number") if value == value // 1 else ("number",))
    return frozenset((_NAMES.get(type(value), "object"),))


def _stated(name: Any) -> Types:
    return frozenset(("number", "integer") if name == "number" else (name,))


def _union(types: Iterable[Types]) -> Types:
    return frozenset().union(*types)
