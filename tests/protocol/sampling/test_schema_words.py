"""Laws of keywords that the library does not have, or not exactly: they are followed or refused by name."""

import json
import random
import re
from typing import Any

import pytest

from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import flaw
from tests.protocol.sampling.test_grammar import CODEC, END, takes, wandered

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
AB, ABC = ({"type": "object", "properties": dict.fromkeys(names, DIGIT)} for names in ("ab", "abc"))
NAME = {"type": "object", "properties": {"a": {"$ref": "/$defs/Name"}}, "required": ["a"], "$defs": {"Name": DIGIT}}
FOLLOWED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    # A schema, what fits it, and what does not.
    (NAME, [{"a": 1}], [{"a": "x"}, {}]),
    (
        {**AB, "patternProperties": {"^(b|c)$": DIGIT}, "additionalProperties": False},
        [{"b": 1, "c": 2}, {}],
        [{"d": 1}],
    ),
    ({**AB, "patternProperties": {"^[ab]$": {"maximum": 5}}}, [{"a": 5}], [{"a": 6}]),
    ({**AB, "patternProperties": {"^x-": DIGIT}, "additionalProperties": False}, [{"a": 1, "x-b": 2}], [{"y": 1}]),
    ({"type": "object", "patternProperties": {"^a$": DIGIT}}, [{"a": 1}], [{"a": "x"}, {"b": 1}]),
    ({"properties": {"b": DIGIT}, "dependentRequired": {"a": ["b"]}}, [{"b": 1, "a": 2}, {}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": DIGIT}, [{"any": 1}], [{"a": ""}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": DIGIT}, [{"b": 1}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{"ab": ""}, {}], [{"d": 1}]),
    ({**ABC, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}, {"b": 1}, {}], [{"a": 1}, {"a": 1, "c": 1}]),
    ({**ABC, "dependentRequired": {"a": ["b"], "b": ["c"]}}, [{"a": 1, "b": 2, "c": 3}, {"c": 3}], [{"a": 1, "b": 2}]),
    (
        {"properties": {"b": DIGIT}, "dependentRequired": {"a": ["b"]}, "additionalProperties": DIGIT},
        [{"b": 1, "a": 2}, {"c": 1}],
        [{"a": 1}],
    ),
    ({**AB, "required": ["a"], "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1}]),
    ({"type": "string", "pattern": r"^[^\"]$"}, ["a", "\\"], ['"', "ab"]),
    ({"type": "string", "pattern": r"^[^\\]+\/\[\^$"}, ['"/[^'], ["\\/[^"]),
]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize(("schema", "fitting", "others"), FOLLOWED)
def test_a_keyword_is_followed(schema: dict[str, Any], fitting: list[Any], others: list[Any], lenient: bool):
    for one in (schema, {"type": "array", "items": schema, "$defs": schema.get("$defs", {})}):
        grammar = Grammar(json.dumps({**one, "x-guidance": {"lenient": True}} if lenient else one))
        around = "{}" if one is schema else "[{}]"
        assert [value for value in fitting if not takes(grammar, around.replace("{}", json.dumps(value)))] == []
        assert [value for value in others if takes(grammar, around.replace("{}", json.dumps(value)))] == []


@pytest.mark.parametrize("names", ["^(a|b)$", "^[ab]$", "^a$", "^(?:a|b|c)$"])
def test_a_listed_name_comes_once_and_leads_to_no_dead_end(names: str):
    grammar = Grammar(json.dumps({**AB, "patternProperties": {names: DIGIT}, "additionalProperties": False}))

    for seed in range(20):
        tokens = wandered(grammar, random.Random(seed), 400)
        assert tokens[-1] == END
        found = re.findall('"(.)"', CODEC.decode(tokens[:-1]))
        assert len(found) == len({*found})


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({**AB, "patternProperties": {"^(a|[bc])$": DIGIT}}, "patternProperties"),
        ({"propertyNames": {"minLength": 2}}, "propertyNames"),
        ({**AB, "dependentRequired": {"a": ["b"]}, "minProperties": 1}, "dependentRequired"),
        ({**ABC, "dependentRequired": {f"p{place}": ["a"] for place in range(40)}}, "longer than"),
        ({"patternProperties": {f"^({'|'.join(map(str, range(5_000)))})$": {"enum": ["x" * 50]}}}, "longer than"),
        *(({"type": "string", "pattern": pattern}, "pattern") for pattern in (r"^\cA$", r"^\0$", r"^(a)\1$", r"\bx")),
        ({"patternProperties": {"^(a|b|c)$": {"multipleOf": 9973}}}, "multipleOf"),
        ({"dependentRequired": {"a": [{}]}}, "wrong type"),
        ({"$ref": "/$defs/None"}, "$defs/None"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(schema: dict[str, Any], word: str):
    assert word in str(flaw(Grammar(json.dumps(schema))))
