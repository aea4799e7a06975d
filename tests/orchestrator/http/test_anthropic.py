"""Laws of /v1/messages: blocks are a chat's messages, events add up to the message, errors have its clients' shape."""

from datetime import datetime
from typing import Any

import pytest

from orchestrator.http.anthropic import MessagesRequest
from tests.support.asked_server import KEY, TEMPLATE, get, post
from tests.support.fake_pipeline import READY, FakePipeline

MESSAGES = "/v1/messages"
HI: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


# What is asked -----------------------------------------------------------------------------------


def test_results_and_words_of_one_message_keep_their_order():
    blocks = [
        {"type": "tool_result", "tool_use_id": "1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "text", "text": "And "},
        {"type": "text", "text": "now?"},
    ]

    asked = MessagesRequest(system=[{"type": "text", "text": "Add."}], messages=[{"role": "user", "content": blocks}])
    assert asked.chat().messages == (
        {"role": "system", "content": "Add."},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: "},
        {"role": "user", "content": "And now?"},
    )


# What is answered --------------------------------------------------------------------------------


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
