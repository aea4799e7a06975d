"""Laws of forms: response_format and tool_choice become grammars that allow what they name and nothing else."""

import json
from typing import Any

import pytest

from orchestrator.api.sampling import SamplingParams
from orchestrator.http.openai.structured_output import call_grammar, response_grammar
from orchestrator.text.answer.parts import Call, Part
from orchestrator.text.answer_format import AnswerFormat
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.families.qwen import JSON_SYNTAX
from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import flaw
from tests.conftest import Reference
from tests.protocol.sampling.test_grammar import PERSON, SAID, takes
from tests.support.asked_server import CHAT, COMPLETIONS, HELLO, post
from tests.support.fake_pipeline import FakePipeline


def tool(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **others}}


ADD = tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


def forced(choice: Any, *tools: Any, most: int | None = None) -> Grammar:
    grammar = call_grammar(tools, choice, most)
    assert grammar is not None
    assert flaw(grammar) is None
    return grammar


def asked(given: dict[str, Any], template: ChatTemplate | None = None) -> Grammar | None:
    """The grammar that reaches the pipeline."""
    pipeline = FakePipeline()
    response = post(CHAT, {**HELLO, **given}, pipeline, **({"template": template} if template else {}))
    assert response.status_code == 200, response.text
    return pipeline.asked[0][1].grammar


def refused(given: dict[str, Any]) -> tuple[str, str]:
    pipeline = FakePipeline()
    response = post(CHAT, {**HELLO, **given}, pipeline)
    error = response.json()["error"]
    assert response.status_code == 400
    assert pipeline.asked == []
    return error["code"], error["param"]


def test_a_form_holds_the_whole_answer_to_its_schema():
    for given, said in ((FORM, SAID), ({"type": "json_object"}, '{"a": [1, {"b": null}]}')):
        grammar = asked({"response_format": given})
        assert grammar is not None
        assert takes(grammar, said)
        assert not takes(grammar, "[1]")
        assert not takes(grammar, f"Here: {said}")
    assert asked({"response_format": {"type": "text"}}) is None
    assert response_grammar({"type": "json_schema", "json_schema": {"name": "any"}}) == response_grammar(
        {"type": "json_object"}
    )


def parts(said: str) -> list[Part]:
    parser = AnswerFormat(None, JSON_SYNTAX).parser(False, [ADD], None)
    return [*parser.push(said), *parser.finish()]


def test_even_a_model_that_knows_no_tools_makes_a_proper_call_when_it_must(reference: Reference):
    pick = tool("pick", {"type": "object", "properties": {"one": {"enum": ["left", "right"]}}, "required": ["one"]})
    pick["function"]["parameters"]["additionalProperties"] = False
    grammar = forced("required", pick, most=1)

    said = reference("import os", SamplingParams(grammar=grammar, temperature=1.0, seed=1, max_tokens=99))

    (found,) = parts(said.text)
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
        assert refused({**given, "tool_choice": "required" if "tools" in given else None})[0] in (
            "invalid_value",
            "invalid_json",
        )


def test_tools_that_a_form_demands_are_refused_with_the_library_s_reason(hermes: ChatTemplate):
    bad = tool("f", {"type": "nonsense"})
    response = post(CHAT, {**HELLO, "tools": [bad], "tool_choice": "required"}, FakePipeline(), template=hermes)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "nonsense" in response.json()["error"]["message"]


def test_penalties_and_log_probabilities_reach_the_pipeline(hermes: ChatTemplate):
    pipeline = FakePipeline()
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -0.5}
    post(CHAT, {**HELLO, **penalties, "logprobs": True, "top_logprobs": 4}, pipeline)
    post(CHAT, {**HELLO, "logprobs": True}, pipeline)
    post(CHAT, {**HELLO, "logprobs": False, "top_logprobs": 0}, pipeline)
    for count in (0, 5, None):
        post(COMPLETIONS, {"prompt": "a", "logprobs": count}, pipeline)

    params = [one for _, one in pipeline.asked]
    assert (params[0].frequency_penalty, params[0].presence_penalty) == (0.5, -0.5)
    assert [one.logprobs for one in params] == [4, 0, None, 0, 5, None]
    assert asked({"tools": [ADD], "tool_choice": "required", "response_format": FORM}, hermes) == forced(
        "required", ADD
    )
