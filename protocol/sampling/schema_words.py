"""A JSON schema in words that the grammar library has, or that it follows more exactly. Pure.

`propertyNames`, `dependentRequired` and patterns of a few names can be said by properties. What can't be said stays,
and the library refuses it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.json_values import is_list, is_object
from protocol.messages.base import MAX_SCHEMA
from protocol.sampling.schema_bounds import METADATA, Schema, SchemaError, each_schema, require_bounds

_NAMES = re.compile(r"\^(?:\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\)|([\w -]+)|\[(\w+)\])\$")
"""A pattern of names that can be listed."""
_FEW_NAMES = re.compile(r"\^[^*+?{.\\]*\$")
"""A pattern of a limited number of names."""
_NEGATED = re.compile(r"(\\.)|\[\^(?!\])", re.DOTALL)
_OUTSIDE = ("$defs", "definitions", "x-guidance")
_COUNTS = frozenset(("minProperties", "maxProperties"))
"""Where not all properties are required, the library has none of these."""


def in_known_words(schema: Schema) -> Schema:
    """The same schema. Raises SchemaError for one that gets too long, or that the library would follow into a dead
    end."""
    found = each_schema(schema, lambda one: _dependents(_patterns(_property_names(_texts(one)))))
    require_bounds(found)
    return found


def _texts(one: Mapping[str, Any]) -> Mapping[str, Any]:
    pattern = one.get("pattern")
    return {**one, "pattern": _without_nul(pattern)} if isinstance(pattern, str) else one


def _without_nul(pattern: str) -> str:
    """For a class with all control characters, the library (1.9) also takes quotes and backslashes."""
    return _NEGATED.sub(lambda found: found[1] or r"[^\x00", pattern)


def _property_names(one: Mapping[str, Any]) -> Mapping[str, Any]:
    names = one.get("propertyNames")
    if not is_object(names) or names.get("type", "string") != "string":
        return one
    others = {name: value for name, value in one.items() if name != "propertyNames"}
    value, said = one.get("additionalProperties", True), names.keys() - METADATA - {"type"}
    if not said:
        return others
    if len(said) > 1 or any(one.get(name) for name in ("properties", "patternProperties", *_COUNTS)):
        return one
    if is_list(listed := names.get("enum")) and all(isinstance(name, str) for name in listed):
        _require_short(value, len(listed))
        return {**others, "properties": dict.fromkeys(listed, value), "additionalProperties": False}
    if "pattern" in said:
        return {**others, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    return one


def _patterns(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """With properties in place of patterns that list them: a name that a pattern allows could come twice."""
    patterns, properties = one.get("patternProperties"), one.get("properties", {})
    if not is_object(patterns) or not is_object(properties):
        return one
    properties, kept = dict(properties), dict[str, Any]()
    for pattern, value in patterns.items():
        found = _NAMES.fullmatch(pattern)
        names = [] if found is None else [*found[3]] if found[3] else (found[1] or found[2]).split("|")
        _require_short(value, len(names))
        for name in names:
            known = properties.get(name, value)
            properties[name] = value if known == value else {"allOf": [known, value]}
        if found is None:
            kept[_without_nul(pattern)] = value
    for pattern in filter(_FEW_NAMES.fullmatch, kept):
        if matched := [name for name in properties if re.search(pattern, name)]:
            raise SchemaError(f"patternProperties {pattern!r} matches the property {matched[0]!r}: name all of them")
    others = {name: value for name, value in one.items() if name != "patternProperties"}
    return {**others, "properties": properties, **({"patternProperties": kept} if kept else {})}


def _dependents(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """One schema for each choice of the properties that need others."""
    needed, properties, required = (one.get(name, {}) for name in ("dependentRequired", "properties", "required"))
    known = is_object(needed) and is_object(properties) and all(map(is_list, needed.values()))
    if not needed or not known or not _COUNTS.isdisjoint(one):
        return one
    others = {name: value for name, value in one.items() if name not in ("dependentRequired", *_OUTSIDE)}
    _require_short(others, 1 << len(needed))
    choices: list[tuple[Sequence[str], Sequence[str]]] = [([], [*required])]
    for name, more in needed.items():
        choices = [
            choice
            for absent, there in choices
            for choice in (([*absent, name], there), (absent, [*there, name, *more]))
            if set(choice[0]).isdisjoint(choice[1])
        ]
    schemas = [
        {**others, "properties": {**properties, **dict.fromkeys(absent, False)}, "required": [*dict.fromkeys(there)]}
        for absent, there in choices
    ]
    return {**{name: one[name] for name in _OUTSIDE if name in one}, "anyOf": schemas}


def _require_short(schema: Any, times: int) -> None:
    if times > 1 and times * len(json.dumps(schema)) > MAX_SCHEMA:
        raise SchemaError(f"with each name by itself it is longer than {MAX_SCHEMA:,} characters")
