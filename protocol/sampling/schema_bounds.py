"""Bounds of a JSON schema (size, depth, keywords that take unlimited memory as a grammar), and where its objects end.

Pure; knows no grammar library. The library itself rejects keywords that it does not support. A schema that names
properties and says nothing about others allows any others, and a small model then invents some until its limit. Here
such an object has the named properties alone: every value of it fits the schema.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from math import isfinite
from typing import Any, TypeAlias

from protocol.json_values import is_list, is_object
from protocol.messages.base import MAX_SCHEMA

MOST_LEVELS = 64
MOST_STATES = 10_000
"""Sum of the divisors of all `multipleOf` (product, if schemas intersect): each remainder is an automaton state."""
MOST_INTERSECTED = 4
"""Expressions that may have to hold at once. The library can't decide whether eight of them can."""

_LEAST = -(2.0**63)
"""Where a number of one of `_NUMBERS` is this or less, the library (1.9) can recurse without end, which ends the
process: it negates the least 64-bit number."""
_NUMBERS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "enum", "const")
_EXPRESSIONS = ("pattern", "format", "multipleOf", "patternProperties")
METADATA = frozenset(("$defs", "definitions", "title", "description", "default", "examples", "deprecated", "$comment"))
"""Keywords beside a `$ref` that do not restrict values."""

Schema: TypeAlias = Mapping[str, Any] | bool


class SchemaError(ValueError):
    """A schema is invalid or beyond the bounds; the text gives the reason."""


def parsed(text: str) -> Schema:
    """The schema in a JSON text. Raises SchemaError if the text is no schema or beyond the bounds."""
    if len(text) > MAX_SCHEMA:
        raise SchemaError(f"it has {len(text):,} characters; the limit is {MAX_SCHEMA:,}")
    try:
        schema = json.loads(text, parse_constant=_no_number, object_hook=_rooted)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"it is not valid JSON ({error})") from error
    if not is_object(schema) and not isinstance(schema, bool):
        raise SchemaError("it must be an object")
    try:
        require_bounds(schema)
    except SchemaError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SchemaError(f"its bounds can't be checked ({type(error).__name__})") from error
    return schema


def require_bounds(schema: Schema) -> None:
    """Raises SchemaError for a schema that is too large or too deep."""
    objects = list(_objects(schema, 0))
    crossing = any(_intersects(one) for one in objects)
    states = 1 if crossing else 0
    for one in objects:
        if any(_too_low(one[name]) for name in _NUMBERS if name in one):
            raise SchemaError(f"a number in {', '.join(_NUMBERS)} must be greater than -2^63")
        if "multipleOf" in one:
            added = _states(one["multipleOf"])
            states = states * added if crossing else states + added
            # At once: products of large numbers take long, and Python computes nothing else meanwhile.
            if states > MOST_STATES:
                raise SchemaError(f"its multipleOf are too large: the limit of all together is {MOST_STATES:,}")
    expressions = sum(name in one for one in objects for name in _EXPRESSIONS)
    if crossing and expressions > MOST_INTERSECTED:
        raise SchemaError(
            f"allOf, or $ref beside other keywords, is supported with at most {MOST_INTERSECTED} uses of "
            f"{', '.join(_EXPRESSIONS)} in the whole schema"
        )


def _objects(value: Any, level: int) -> Iterator[Mapping[str, Any]]:
    """All objects in `value`, schemas or not."""
    if level > MOST_LEVELS:
        raise SchemaError(f"it is nested deeper than {MOST_LEVELS} levels")
    if is_object(value):
        yield value
        value = list(value.values())
    if is_list(value):
        for one in value:
            yield from _objects(one, level + 1)


def _intersects(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas must hold at once."""
    several = isinstance(schema.get("allOf"), list) and (len(schema["allOf"]) > 1 or len(schema) > 1)
    return several or ("$ref" in schema and not schema.keys() <= {"$ref", *METADATA})


def _too_low(value: Any) -> bool:
    """Whether it is, or holds, a number that is too low. Its depth is bounded already."""
    if is_object(value):
        value = list(value.values())
    if is_list(value):
        return any(map(_too_low, value))
    # An integer is converted as the library does it.
    return isinstance(value, int | float) and float(min(max(value, 2 * _LEAST), 0)) <= _LEAST


def _states(divisor: Any) -> int:
    """Automaton states of a `multipleOf`: those of 0.25 equal those of 25. At most a little above the limit."""
    if isinstance(divisor, str) or (isinstance(divisor, float) and not isfinite(divisor)):
        raise SchemaError("a multipleOf must be a finite number, not a text")
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        # A property of this name, or what the library rejects.
        return 1
    _, digits, exponent = Decimal(str(divisor)).normalize().as_tuple()
    if len(digits) + max(0, int(exponent)) > len(str(MOST_STATES)):
        return MOST_STATES + 1
    return max(1, int("".join(map(str, digits))) * 10 ** max(0, int(exponent)))


def _rooted(one: dict[str, Any]) -> dict[str, Any]:
    """litellm's references have no `#`."""
    reference = one.get("$ref")
    return {**one, "$ref": f"#{reference}"} if isinstance(reference, str) and reference[:1] == "/" else one


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas: one, a list of them, a mapping from names to them."""
_JOINED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
"""Keywords whose schemas hold together with the ones beside them."""
_OTHERS = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"))
"""Keywords that say whether there are other properties."""


def closed(schema: Schema) -> Schema:
    """The schema whose objects have no other properties than those that it names, unless it asks for others. Where
    schemas hold together, one may name what another one does not, so such a schema stays as it is."""
    if isinstance(schema, bool) or any(_joins(one) for one in _schemas(schema)):
        return schema
    return each_schema(schema, lambda one: {**one, "additionalProperties": False} if _names_all(one) else one)


def each_schema(schema: Any, change: Callable[[Mapping[str, Any]], Any]) -> Any:
    """With this change to all schemas in it, the inner ones first."""
    if not is_object(schema):
        return schema
    found = dict(schema)
    for name in _ONE:
        if is_object(found.get(name)):
            found[name] = each_schema(found[name], change)
    for name in _LISTED:
        if is_list(found.get(name)):
            found[name] = [each_schema(each, change) for each in found[name]]
    for name in _NAMED:
        if is_object(found.get(name)):
            found[name] = {key: each_schema(each, change) for key, each in found[name].items()}
    return change(found)


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether it names properties, all required ones among them, and says nothing about others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not is_object(properties) or not properties or not is_list(required):
        return False
    return _OTHERS.isdisjoint(schema) and all(isinstance(name, str) and name in properties for name in required)


def _joins(schema: Mapping[str, Any]) -> bool:
    inside = _JOINED.intersection(schema)
    beside = schema.keys() - inside - METADATA - {"x-guidance"}
    return "allOf" in inside or bool(inside and beside) or len(inside) > 1


def _schemas(schema: Any) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []

    def kept(one: Mapping[str, Any]) -> Mapping[str, Any]:
        found.append(one)
        return one

    each_schema(schema, kept)
    return found
