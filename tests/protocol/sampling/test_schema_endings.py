"""Laws of the ends of objects: none has properties that its schema does not name, unless the schema asks for others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages.grammar import Grammar
from protocol.sampling.schema_bounds import closed
from tests.protocol.sampling.test_grammar import takes

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
WHOLE, MORE = '{"name": "Bob"}', '{"name": "Bob", "x": 1}'


@pytest.mark.parametrize(
    ("schema", "said", "more"),
    [
        (NAME, WHOLE, MORE),
        ({"type": "array", "items": NAME}, f"[{WHOLE}]", f"[{MORE}]"),
        ({"anyOf": [NAME, {"type": "null"}], "title": "Name"}, WHOLE, MORE),
        ({"anyOf": [NAME, {"type": "null"}], "x-guidance": {"lenient": True}}, WHOLE, MORE),
        ({"$defs": {"name": NAME}, "$ref": "#/$defs/name"}, WHOLE, MORE),
        ({**NAME, "properties": {"name": {}, "properties": {}}}, '{"name": {}, "properties": 1}', MORE),
    ],
)
def test_an_object_ends_with_the_properties_that_its_schema_names(schema: Any, said: str, more: str):
    grammar = Grammar(json.dumps(schema))

    assert takes(grammar, said)
    assert not takes(grammar, more)


@pytest.mark.parametrize(
    "schema",
    [
        {**NAME, "additionalProperties": True},
        {**NAME, "additionalProperties": {"type": "integer"}},
        {"type": "object"},
        {**NAME, "required": ["name", "x"]},
        {"allOf": [NAME, {"properties": {"x": {"type": "integer"}}, "required": ["x"]}]},
        {**NAME, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"x": {"type": "integer"}}}}},
    ],
)
def test_a_schema_that_asks_for_others_keeps_them(schema: Any):
    assert closed(schema) == schema
    assert takes(Grammar(json.dumps(schema)), MORE)


@given(
    schema=st.recursive(
        st.sampled_from([True, {}, NAME, {"const": {"properties": {"a": 1}}}]),
        lambda inner: st.dictionaries(
            st.sampled_from(["items", "anyOf", "properties", "$defs", "not", "required", "type"]),
            inner | st.lists(inner, max_size=2),
            max_size=3,
        ),
        max_leaves=6,
    )
)
def test_nothing_else_of_a_schema_changes(schema: Any):
    assert open_again(closed(schema)) == schema


def open_again(schema: Any) -> Any:
    if isinstance(schema, list):
        return [open_again(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if (name, value) != ("additionalProperties", False)}
    return {name: open_again(value) for name, value in kept.items()}
