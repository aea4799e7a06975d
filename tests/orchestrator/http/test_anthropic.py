"""Laws of /v1/messages: blocks are a chat's messages, events add up to the message, errors have its clients' shape."""

import json
import time
from contextlib import suppress
from datetime import datetime
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.http.anthropic.request import MessagesRequest, messages
from orchestrator.http.errors import ApiError
from orchestrator.http.request_bodies import decoded
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError, PipelineError
from tests.orchestrator.http.test_responses import ITEM, JSON, SCHEMA, TURNS, saying, unnamed
from tests.orchestrator.http.test_rules import CHAT, KEY, TEMPLATE, get, post, talk
from tests.orchestrator.http.test_tool_calls import SAID, hermes
from tests.support.fake_pipeline import READY, FakePipeline

__all__ = ["hermes"]

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
]


def events(response: httpx.Response) -> list[Any]:
    told = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return [event for event in told if event["type"] != "ping"]


def rebuilt(told: list[Any]) -> Any:
    """The message that the events tell of."""
    assert (told[0]["type"], told[-1]["type"]) == ("message_start", "message_stop")
    message, arguments = told[0]["message"], ""
    for event in told[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta" if event["delta"]["type"] in ("thinking_delta", "signature_delta"):
                name = event["delta"]["type"].removesuffix("_delta")
                message["content"][event["index"]][name] += event["delta"][name]
            case "content_block_delta":
                arguments += event["delta"]["partial_json"]
            case "content_block_stop":
                if arguments:
                    message["content"][event["index"]]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


# What is asked -----------------------------------------------------------------------------------


def as_turns(turn: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "text", "text": turn["content"]}
    if turn["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": [text]}
        return {"role": "user", "content": [result]}
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        for call in turn.get("tool_calls", [])
    ]
    return {"role": turn["role"], "content": [text, *calls]}


@given(turns=TURNS, last=st.text("ab", max_size=3))
def test_a_chat_survives_being_blocks(turns: list[dict[str, Any]], last: str):
    asked = [*turns, {"role": "user", "content": last}]

    assert messages(None, [as_turns(turn) for turn in asked]) == asked


def test_results_and_words_of_one_message_keep_their_order():
    blocks = [
        {"type": "tool_result", "tool_use_id": "1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "text", "text": "And "},
        {"type": "text", "text": "now?"},
    ]

    assert messages([{"type": "text", "text": "Add."}], [{"role": "user", "content": blocks}]) == [
        {"role": "system", "content": "Add."},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: "},
        {"role": "user", "content": "And now?"},
    ]


def test_many_blocks_take_time_in_proportion():
    blocks = [{"type": "text", "text": "x" * 100}] * 20_000

    began = time.process_time()
    (message,) = messages(None, [{"role": "user", "content": blocks}])

    # Adding each text to a copy of those before took nine seconds.
    assert time.process_time() - began < 1
    assert len(message["content"]) == 2_000_000


def test_a_request_is_translated_to_a_chat():
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7}
    pipeline = FakePipeline()

    post(MESSAGES, {**HI, "system": "Be brief.", "stop_sequences": ["x"], **asked}, pipeline)
    heading = [{"role": "system", "content": "Be brief."}, *HI["messages"]]
    post(CHAT, {"messages": heading, "max_tokens": 9, "stop": ["x"], **asked}, pipeline)

    (prompt, params), (expected, chat) = pipeline.asked
    assert (list(prompt), params) == (list(expected), chat)


def test_a_request_may_allow_one_call_at_most():
    choice = {"type": "auto", "disable_parallel_tool_use": True}

    assert MessagesRequest(**HI, tools=TOOLS, tool_choice=choice).chat().most_calls == 1


@pytest.mark.parametrize(
    ("fields", "in_chats"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, {"tools": CHAT_TOOLS, "tool_choice": "required"}),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {"tools": CHAT_TOOLS, "tool_choice": "none"}),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
            {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA["schema"]}}},
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "name": "answer", "strict": True}}},
        ),
    ],
)
def test_choices_and_formats_are_what_they_are_in_a_chat(hermes: ChatTemplate, fields: Any, in_chats: Any):
    ours, chats = FakePipeline(), FakePipeline()

    found = post(MESSAGES, {**HI, "seed": 1, **fields}, ours, template=hermes)
    expected = post(CHAT, {**HI, "seed": 1, **in_chats}, chats, template=hermes)

    assert (found.status_code, ours.asked) == (expected.status_code, chats.asked)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"temperature": "hot"}, "temperature"),
        ({"tool_choice": {"type": []}}, ""),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_an_error_names_the_wrong_or_unsupported_field(change: dict[str, Any], word: str):
    body = {name: value for name, value in {**HI, **change}.items() if value is not None}

    response = post(MESSAGES, body)

    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert word in answer["error"]["message"]


TURN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system"]),
    st.one_of(JSON, st.lists(ITEM, max_size=3)),
)


@settings(max_examples=40)
@given(
    turns=st.lists(st.one_of(TURN, JSON), min_size=1, max_size=3),
    others=st.dictionaries(st.sampled_from(["system", "tools", "tool_choice", "thinking", "output_config"]), JSON),
)
def test_any_input_is_a_chat_or_a_refusal(turns: list[Any], others: dict[str, Any]):
    with suppress(ApiError):
        chat = decoded(json.dumps({"messages": turns, "max_tokens": 1, **others}).encode(), MessagesRequest).chat()
        assert all(isinstance(message["content"], str) for message in chat.messages)


# What is answered --------------------------------------------------------------------------------


def test_a_message_says_what_it_cost_and_counts_what_was_known_already_apart():
    answer = post(MESSAGES, HI).json()

    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "demo")
    assert answer["content"] == [{"type": "text", "text": "Hello"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": len(TEMPLATE.tokens(HI["messages"])) - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 5,
    }


@pytest.mark.parametrize(
    ("ends", "reason", "sequence"),
    [
        (("stop", None), "end_turn", None),
        (("stop", "x"), "stop_sequence", "x"),
        (("stop", "\nUser:"), "end_turn", None),
        (("length", None), "max_tokens", None),
    ],
)
def test_the_stop_reason_distinguishes_stop_sequences_from_the_models_end(ends: Any, reason: str, sequence: str | None):
    answer = post(MESSAGES, {**HI, "stop_sequences": ["x"]}, FakePipeline(ends=ends)).json()

    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_add_up_to_the_message(hermes: ChatTemplate, size: int):
    cut = [SAID[start : start + size] for start in range(0, len(SAID), size)]
    asked = {**HI, "tools": TOOLS}
    whole = post(MESSAGES, asked, saying([SAID]), template=hermes).json()

    told = events(post(MESSAGES, {**asked, "stream": True}, saying(cut), template=hermes))

    assert unnamed(rebuilt(told)) == unnamed(whole)
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][1:]] == [{"a": 1, "b": [2]}, {"a": 3, "b": [2]}]
    assert whole["stop_reason"] == "tool_use"


def test_errors_have_the_shape_that_its_clients_read():
    at_once = post(MESSAGES, HI, FakePipeline(lambda _: [InputError("No.")]))
    later = post(MESSAGES, {**HI, "stream": True}, FakePipeline(lambda _: ["Hel", PipelineError("Oh.")]))
    refused = talk(lambda client: client.post(MESSAGES, json=HI), headers={"x-api-key": "wrong"})
    unknown = post(MESSAGES, {**HI, "model": "other"})

    assert at_once.json()["error"] == {"type": "invalid_request_error", "message": "No."}
    assert events(later)[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "Oh."}}
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert talk(lambda client: client.post(MESSAGES, json=HI), headers={"x-api-key": KEY}).status_code == 200


def test_tokens_are_counted_as_they_would_be_read():
    asked = {"messages": HI["messages"], "system": "Be brief."}
    expected = TEMPLATE.tokens([{"role": "system", "content": "Be brief."}, *HI["messages"]])

    assert post(COUNT, asked).json() == {"input_tokens": len(expected)}
    assert post(COUNT, {**asked, "model": "other"}).status_code == 404
    assert post(COUNT, {**asked, "tools": TOOLS}).json()["error"]["type"] == "invalid_request_error"


# What else clients of this API ask ----------------------------------------------------------------

VERSION = {"anthropic-version": "2023-06-01", "x-api-key": KEY}


def test_a_prompt_that_is_too_long_says_by_how_much():
    question = {**HI, "messages": [{"role": "user", "content": "a b " * 400}]}
    tokens = len(TEMPLATE.tokens(question["messages"]))

    error = post(MESSAGES, question).json()["error"]

    message = f"prompt is too long: {tokens} tokens > {READY.context - 1} maximum"
    assert error == {"type": "invalid_request_error", "message": message}


@pytest.mark.parametrize("condition", [READY, None])
def test_models_are_listed_in_this_api_s_form_for_its_clients(condition: Any):
    found = get("/v1/models", FakePipeline(condition=condition), headers=VERSION, names=("a", "b/c")).json()

    context = None if condition is None else READY.context
    assert {name: value for name, value in found.items() if name != "data"} == {
        "has_more": False,
        "first_id": "a",
        "last_id": "b/c",
    }
    assert [(card["id"], card["type"], card["display_name"]) for card in found["data"]] == [
        ("a", "model", "a"),
        ("b/c", "model", "b/c"),
    ]
    assert all(card["max_input_tokens"] == context for card in found["data"])
    assert datetime.fromisoformat(found["data"][0]["created_at"]).tzinfo is not None
    card, missing = get("/v1/models/demo", headers=VERSION).json(), get("/v1/models/other", headers=VERSION)
    assert (card["id"], card["type"]) == ("demo", "model")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
