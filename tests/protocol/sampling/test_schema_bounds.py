"""A schema is accepted or a SchemaError, at once, whatever stands where a number belongs."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import flaw
from protocol.sampling.schema_bounds import SchemaError, parsed

NUMERIC = (
    *("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
TEXTS = st.from_regex(r"-?[0-9]{1,9}(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,12})?", fullmatch=True)
NUMBERS: st.SearchStrategy[Any] = st.one_of(
    TEXTS, st.sampled_from(["NaN", "sNaN", "-Infinity", "", "1e1000000000"]), st.integers(), st.floats(), st.booleans()
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(st.sampled_from(NUMERIC), NUMBERS, max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(lambda schemas: {"allOf": schemas}),
        st.dictionaries(st.sampled_from((*NUMERIC, "a")), inner, max_size=3).map(lambda named: {"properties": named}),
    ),
    max_leaves=8,
)


@given(schema=SCHEMAS)
def test_whatever_stands_for_a_number_is_accepted_or_refused_at_once(schema: Any):
    began = time.process_time()
    with suppress(SchemaError):
        parsed(json.dumps(schema))

    assert time.process_time() - began < 1


_QUOTED = ({"multipleOf": "1e1000000000"}, {"allOf": [{"multipleOf": f"1e{999_990 + n}"} for n in range(8)]})
_HIDING = {"allOf": [{"multipleOf": 0}, {"multipleOf": 9999}, {"multipleOf": 9999}]}


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        *(("multipleOf", json.dumps(schema)) for schema in (*_QUOTED, {"multipleOf": "3"}, _HIDING)),
        *(("multipleOf", f'{{"multipleOf": {number}}}') for number in ("1e400", "-1e400", "1e308", "1" + "0" * 4000)),
        # Over these the library ends the process.
        *(
            ("must be greater than -2^63", schema)
            for schema in (
                '{"type": "integer", "minimum": -1e30, "maximum": -1e26}',
                '{"type": "integer", "minimum": -9223372036854775807, "maximum": -9223372036854775807}',
                '{"allOf": [{"type": "integer", "exclusiveMinimum": -1e30}, {"exclusiveMaximum": -1e29}]}',
                '{"type": "integer", "enum": [-1e30]}',
                '{"type": "integer", "const": -' + "9" * 400 + "}",
            )
        ),
    ],
)
def test_a_number_that_can_not_be_enforced_is_refused_at_once(words: str, schema: str):
    began = time.process_time()

    assert words in str(flaw(Grammar(schema)))
    assert time.process_time() - began < 1


def test_a_number_beyond_64_bits_that_the_library_takes_is_accepted():
    assert flaw(Grammar('{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}')) is None


def test_a_property_may_have_the_name_of_a_keyword():
    assert parsed(json.dumps({"properties": {"multipleOf": {"type": "string"}}}))
