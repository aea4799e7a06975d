"""What a JSON schema must keep to before a grammar is made of it: size, depth, and what would take memory without end.

Pure; knows no grammar library. What the library itself does not support, it says itself.
"""

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from math import prod
from typing import Any, TypeAlias

from protocol.messages.base import MAX_SCHEMA

MOST_LEVELS = 64
MOST_STATES = 10_000
"""The divisors of all `multipleOf` together: a number's remainder is a state of the automaton that reads it."""
MOST_INTERSECTED = 4
"""Expressions that may have to hold at once. Whether eight of them can is beyond the library's means."""

_EXPRESSIONS = ("pattern", "format", "multipleOf", "patternProperties")
_REMARKS = frozenset(("$defs", "definitions", "title", "description", "default", "examples", "deprecated", "$comment"))
"""What says nothing of values beside a `$ref`."""

Schema: TypeAlias = Mapping[str, Any] | bool


class SchemaError(ValueError):
    """The text says what is wrong with a schema."""


def parsed(text: str) -> Schema:
    """The schema in a JSON text. Raises SchemaError for none, and for one beyond the bounds."""
    if len(text) > MAX_SCHEMA:
        raise SchemaError(f"it has {len(text):,} characters, and {MAX_SCHEMA:,} are the most")
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"it is not valid JSON ({error})") from error
    if not isinstance(schema, dict | bool):
        raise SchemaError("it must be an object")
    _require_bounds(schema)
    return schema


def _require_bounds(schema: Schema) -> None:
    objects = list(_objects(schema, 0))
    divisors = [_states(one["multipleOf"]) for one in objects if "multipleOf" in one]
    crossing = any(_intersects(one) for one in objects)
    if (prod(divisors) if crossing else sum(divisors)) > MOST_STATES:
        raise SchemaError(f"its multipleOf are too large: together they may come to {MOST_STATES:,}")
    expressions = sum(name in one for one in objects for name in _EXPRESSIONS)
    if crossing and expressions > MOST_INTERSECTED:
        raise SchemaError(
            f"allOf, or $ref beside other keywords, is supported with at most {MOST_INTERSECTED} uses of "
            f"{', '.join(_EXPRESSIONS)} in the whole schema"
        )


def _objects(value: Any, level: int) -> Iterator[Mapping[str, Any]]:
    """Every object in it, whether it is a schema or only looks like one."""
    if level > MOST_LEVELS:
        raise SchemaError(f"it is nested deeper than {MOST_LEVELS} levels")
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _objects(one, level + 1)


def _intersects(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas have to hold at once."""
    several = isinstance(schema.get("allOf"), list) and (len(schema["allOf"]) > 1 or len(schema) > 1)
    return several or ("$ref" in schema and not schema.keys() <= {"$ref", *_REMARKS})


def _states(divisor: Any) -> int:
    """Of 0.25 as many as of 25."""
    try:
        _, digits, exponent = Decimal(str(divisor)).normalize().as_tuple()
    except InvalidOperation:
        # Not a number, as the library will say.
        return 1
    return int("".join(map(str, digits))) * 10 ** max(0, int(exponent))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
