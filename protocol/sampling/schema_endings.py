"""Where the objects of a JSON schema end. Pure; knows no grammar library.

A schema that names properties and says nothing about others allows any others, and a small model then invents some
until its limit. Here such an object has the named properties alone: every value of it fits the schema.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from protocol.json_values import is_list, is_object
from protocol.sampling.schema_bounds import METADATA, Schema

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
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if not is_object(schema):
        return schema
    found = dict(schema)
    for name in _ONE:
        if is_object(found.get(name)):
            found[name] = _closed(found[name])
    for name in _LISTED:
        if is_list(found.get(name)):
            found[name] = [_closed(each) for each in found[name]]
    for name in _NAMED:
        if is_object(found.get(name)):
            found[name] = {key: _closed(each) for key, each in found[name].items()}
    return {**found, "additionalProperties": False} if _names_all(schema) else found


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


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    if not is_object(schema):
        return
    yield schema
    for name in _ONE:
        yield from _schemas(schema.get(name))
    for name in _LISTED:
        listed = schema.get(name)
        for each in listed if is_list(listed) else ():
            yield from _schemas(each)
    for name in _NAMED:
        named = schema.get(name)
        for each in named.values() if is_object(named) else ():
            yield from _schemas(each)
