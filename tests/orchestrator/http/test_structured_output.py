"""Laws of forms: response_format and tool_choice become grammars that allow what they name and nothing else."""

import json
from typing import Any

import pytest

from orchestrator.api.sampling import SamplingParams
from orchestrator.http.openai.structured_output import call_grammar, response_grammar
from orchestrator.text.answer.parts import Call
from orchestrator.text.answer_format import AnswerFormat
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.families.qwen import JSON_SYNTAX
from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import flaw
from tests.conftest import Reference
from tests.orchestrator.text.test_answer_parsers import joined
from tests.protocol.sampling.test_grammar import PERSON, SAID, takes
from tests.support.asked_server import CHAT, HELLO, asked, post


def tool(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **others}}


ADD = tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


def forced(choice: Any, *tools: Any, most: int | None = None) -> Grammar:
    grammar = call_grammar(tools, choice, most)
    assert grammar is not None
    assert flaw(grammar) is None
    return grammar


def test_a_form_holds_the_whole_answer_to_its_schema():
    def bound(form: Any) -> Grammar | None:
        return asked(CHAT, {**HELLO, "response_format": form}).params.grammar

    for form, said in ((FORM, SAID), ({"type": "json_object"}, '{"a": [1, {"b": null}]}')):
        grammar = bound(form)
        assert grammar is not None
        assert takes(grammar, said)
        assert not takes(grammar, "[1]")
        assert not takes(grammar, f"Here: {said}")
    assert bound({"type": "text"}) is None
    assert response_grammar({"type": "json_schema", "json_schema": {"name": "any"}}) == response_grammar(
        {"type": "json_object"}
    )


def test_even_a_model_that_knows_no_tools_makes_a_proper_call_when_it_must(reference: Reference):
    pick = tool("pick", {"type": "object", "properties": {"one": {"enum": ["left", "right"]}}, "required": ["one"]})
    pick["function"]["parameters"]["additionalProperties"] = False
    grammar = forced("required", pick, most=1)

    said = reference("import os", SamplingParams(grammar=grammar, temperature=1.0, seed=1, max_tokens=99))

    parser = AnswerFormat(None, JSON_SYNTAX).parser(False, [pick], None)
    (found,) = joined([*parser.push(said.text), *parser.finish()])
    assert said.finish_reason == "stop"
    assert isinstance(found, Call)
    assert json.loads(found.arguments)["one"] in ("left", "right")


@pytest.mark.parametrize("schema", [{"not": {}}, {"oneOf": [{"type": "string"}, {"maxLength": 3}]}])
def test_only_what_is_strict_is_refused_for_a_schema_beyond_the_library(schema: Any):
    assert flaw(forced("required", tool("f", {"properties": {"a": schema}}))) is None
    strict = call_grammar([tool("f", {"properties": {"a": schema}}, strict=True)], "required", None)
    assert strict is not None
    assert flaw(strict) is not None


@pytest.mark.parametrize("levels", [100, 400, 900])
def test_endless_nesting_is_refused(levels: int):
    deep: Any = {}
    for _ in range(levels):
        deep = {"items": deep}
    for given in ({"response_format": {**FORM, "json_schema": {"schema": deep}}}, {"tools": [tool("f", deep)]}):
        response = post(CHAT, {**HELLO, **given, "tool_choice": "required" if "tools" in given else None})
        assert (response.status_code, response.json()["error"]["code"][:8]) == (400, "invalid_")


def test_tools_that_a_form_demands_are_refused_with_the_library_s_reason(hermes: ChatTemplate):
    bad = tool("f", {"type": "nonsense"})
    response = post(CHAT, {**HELLO, "tools": [bad], "tool_choice": "required"}, template=hermes)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "nonsense" in response.json()["error"]["message"]


def test_where_a_call_is_demanded_its_grammar_counts_and_not_the_form_s(hermes: ChatTemplate):
    given = {"tools": [ADD], "tool_choice": "required", "response_format": FORM}

    assert asked(CHAT, {**HELLO, **given}, hermes).params.grammar == forced("required", ADD)
