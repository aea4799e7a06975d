"""Laws of the Responses API's tools: namespaces and custom tools are functions to the model, not to clients."""

import json
from typing import Any

import pytest

from orchestrator.http.responses.request import Response, custom_arguments, custom_input, messages
from orchestrator.text.chat_template import ChatTemplate
from protocol.messages.grammar import Json
from tests.orchestrator.http.test_responses import RESPONSES, TOOLS, events, rebuilt, saying, unnamed
from tests.orchestrator.http.test_rules import post
from tests.orchestrator.http.test_tool_calls import hermes
from tests.support.fake_pipeline import FakePipeline

__all__ = ["hermes"]

ADD = TOOLS[0]
NAMESPACE = {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": [ADD, {**ADD, "name": "sub"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SEARCH = {"type": "web_search", "external_web_access": False}
CODEX = [ADD, NAMESPACE, PATCH, SEARCH, {"type": "image_generation"}, SEARCH]
"""The kinds of tools that Codex sends."""


def called(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def functions(*tools: Any) -> dict[str, Any]:
    """What the model is told of each tool, by its name."""
    offered = [tool["function"] for tool in Response(input="a", tools=[*tools]).chat([]).offered]
    return {function.pop("name"): function for function in ({**each} for each in offered)}


def test_functions_of_namespaces_get_joined_names_and_the_description_of_a_namespace_is_read_once():
    about_add = {**ADD, "description": "Adds."}
    found = functions(NAMESPACE, {**NAMESPACE, "name": "crm_", "tools": [{**ADD, "name": "_add"}]})
    described = functions({**NAMESPACE, "tools": [about_add, {**about_add, "name": "more"}]})

    assert list(found) == ["mcp__sums__add", "mcp__sums__sub", "crm__add"]
    assert found["mcp__sums__sub"] == {"parameters": {"type": "object"}, "strict": False}
    assert [function["description"] for function in described.values()] == ["Sums.\n\nAdds.", "Adds."]


def test_a_custom_tool_is_a_function_of_one_text_which_its_grammar_describes():
    (function,) = functions(PATCH).values()

    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert function["description"] == "Patches files.\n\nThe input follows this lark grammar:\nstart: /.+/"


def test_the_same_tool_may_come_twice_but_not_two_of_one_name():
    assert list(functions(ADD, ADD)) == ["add"]
    response = post(RESPONSES, {"input": "a", "tools": [ADD, {**PATCH, "name": "add"}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_back_as_what_the_client_offered(hermes: ChatTemplate, stream: bool):
    said = [
        called("add", {"a": 1}),
        called("mcp__sums__add", {"a": 2}),
        called("apply_patch", {"input": "*** Begin\nü"}),
        called("apply_patch", {"patch": 1}),
    ]
    question = {"input": "Hi", "tools": CODEX, "stream": stream}

    answer = post(RESPONSES, question, saying(["\n".join(said)]), template=hermes)

    output = events(answer)[-1]["response"]["output"] if stream else answer.json()["output"]
    kept = ("type", "namespace", "name", "arguments", "input", "status")
    assert [{name: item[name] for name in kept if name in item} for item in output] == [
        {"type": "function_call", "name": "add", "arguments": '{"a":1}', "status": "completed"},
        {
            "type": "function_call",
            "namespace": "mcp__sums",
            "name": "add",
            "arguments": '{"a":2}',
            "status": "completed",
        },
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\nü", "status": "completed"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch":1}', "status": "completed"},
    ]


def test_the_events_of_a_custom_call_add_up_to_its_item(hermes: ChatTemplate):
    said = called("apply_patch", {"input": "abc"})
    question = {"input": "Hi", "tools": [PATCH]}
    whole = post(RESPONSES, question, saying([said]), template=hermes).json()

    sent = events(post(RESPONSES, {**question, "stream": True}, saying([said]), template=hermes))

    kinds = [event["type"].removeprefix("response.") for event in sent[2:-1]]
    assert kinds == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert unnamed(rebuilt(sent)) == unnamed(whole["output"])


def test_tools_that_are_not_run_here_are_left_out_and_told(hermes: ChatTemplate):
    answer = post(RESPONSES, {"input": "Hi", "tools": CODEX, "stream": True}, template=hermes)

    for event in (events(answer)[0], events(answer)[-1]):
        assert [warning.split("'")[1] for warning in event["response"]["warnings"]] == [
            "web_search",
            "image_generation",
        ]
        assert event["response"]["tools"] == CODEX
    # A model without tools answers if none is left.
    assert post(RESPONSES, {"input": "Hi", "tools": [SEARCH], "top_logprobs": 1}).status_code == 200


def test_earlier_calls_have_the_names_that_the_model_knows():
    call = {"call_id": "1", "name": "add", "namespace": "mcp__sums"}

    assistant, added, patched = messages(
        [
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {**call, "type": "function_call", "arguments": "{}"},
            {**call, "type": "custom_tool_call", "name": "apply_patch", "namespace": None, "input": "abc"},
            {"type": "function_call_output", "call_id": "1", "output": "4"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "5"}]},
        ]
    )

    assert [each["function"] for each in assistant["tool_calls"]] == [
        {"name": "mcp__sums__add", "arguments": "{}"},
        {"name": "apply_patch", "arguments": '{"input":"abc"}'},
    ]
    assert (added["content"], patched["content"]) == ("4", "5")


@pytest.mark.parametrize("text", ["", "*** Begin", '{"input": 1}', '\n\\"ü'])
def test_the_input_of_a_custom_tool_survives_being_arguments(text: str):
    assert custom_input(custom_arguments(text)) == text


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "add", "namespace": "mcp__sums"}, "mcp__sums__add"),
    ],
)
def test_a_named_tool_is_forced_by_the_name_that_the_model_knows(
    hermes: ChatTemplate, choice: dict[str, str], name: str
):
    pipeline = FakePipeline()

    post(RESPONSES, {"input": "Hi", "tools": CODEX, "tool_choice": choice}, pipeline, template=hermes)

    ((_, params),) = pipeline.asked
    assert params.grammar is not None
    assert params.grammar.calls is not None
    (form,) = params.grammar.calls.forms
    assert any(isinstance(part, Json) and f'"const": "{name}"' in part.schema for part in form)


def test_a_choice_may_leave_some_of_the_tools():
    listed = [{"type": "function", "name": "sub", "namespace": "mcp__sums"}, {"type": "custom", "name": "apply_patch"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [*listed, {"type": "image_generation"}]}

    chat = Response(input="a", tools=[*CODEX], tool_choice=choice).chat([])

    assert [tool["function"]["name"] for tool in chat.offered] == ["mcp__sums__sub", "apply_patch"]
