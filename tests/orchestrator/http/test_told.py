"""Laws of what the server tells about its models and their tokens, in the words of its clients."""

from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from orchestrator.runtime.client_frontend import to_request
from orchestrator.text.chat_template import ChatTemplate
from protocol.messages.client import PipelineState
from protocol.messages.sampling import ModelSampling
from tests.support.asked_server import CHAT, CODEC, HELLO, asked, get, post, talk
from tests.support.fake_pipeline import READY, FakePipeline

TURNS = HELLO["messages"]


@pytest.mark.parametrize("condition", [replace(READY, level="chain"), replace(READY, level="plain"), None])
def test_models_tell_their_level_context_and_sampling_under_each_name(condition: PipelineState | None):
    (card,) = get("/v1/models", FakePipeline(condition=condition)).json()["data"]

    context, level = (None, None) if condition is None else (condition.context, condition.level)
    assert card == get("/v1/models/demo", FakePipeline(condition=condition)).json() | {"created": card["created"]}
    assert card["level"] == level

    for name in ("context_length", "max_model_len", "context_window", "max_context_length", "loaded_context_length"):
        assert card[name] == context
    assert card["default_parameters"] == card["sampling_defaults"]
    assert "temperature" in card["default_parameters"]


def test_clients_of_lm_studio_find_its_routes():
    (card,) = get("/api/v0/models").json()["data"]

    assert (card["id"], card["type"], card["state"], card["capabilities"]) == ("demo", "llm", "loaded", ["tool_use"])
    assert card["loaded_context_length"] == READY.context
    answer = post("/api/v0/chat/completions", HELLO).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"


def test_the_key_and_the_model_s_name_are_checked():
    body = {**HELLO, "input": "Hi", "model": "other"}

    assert post("/v1/responses/compact", body).status_code == 404
    assert post("/v1/responses/compact", body, headers={}).status_code == 401


# Warnings -----------------------------------------------------------------------------------------


HI = {"role": "user", "content": "Hi"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "4"}


def test_answers_with_warnings_are_counted_in_the_log_and_in_the_metrics(
    models: dict[str, ChatTemplate], caplog: pytest.LogCaptureFixture
):
    async def ask(client: httpx.AsyncClient) -> str:
        for _ in range(11):
            await client.post(CHAT, json={"messages": [HI, TOOL]})
        return (await client.get("/metrics")).text

    figures = talk(ask, template=models["forgetful"])

    assert caplog.messages == [f"answers with a warning (unread): {count}" for count in (1, 10)]
    assert 'launch_pipeline_warned_requests_total{kind="unread"} 11.0' in figures.splitlines()


@pytest.mark.parametrize(
    ("body", "yields"),
    [
        ({"model": "claude-haiku-4-5-20251001"}, True),
        (
            {"messages": [{"role": "system", "content": "You are a title generator. Output a title."}, HI]},
            True,
        ),
        ({"messages": [{"role": "user", "content": "### Task:\nGenerate 1-3 broad tags for this chat."}]}, True),
        ({"messages": [HI, {"role": "user", "content": "Summarize our conversation in one sentence."}]}, True),
        ({"messages": [{"role": "user", "content": "What does the title mean?"}], "background": True}, False),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_what_clients_ask_by_themselves_yields(path: str, body: dict[str, Any], yields: bool):
    found = asked(path, {**HELLO, "max_tokens": 9, **body})

    assert found.params.background is yields
    assert any("answers" in warning for warning in found.warnings) == ("model" in body)


@pytest.mark.parametrize(("body", "seeded"), [({}, False), ({"seed": 0}, True)])
def test_whether_a_client_chose_the_seed_reaches_the_scheduler(body: dict[str, Any], seeded: bool):
    found = asked(CHAT, {**HELLO, **body})
    task = to_request(found.params.submit("r", found.tokens), CODEC, ModelSampling())

    assert task.seeded is seeded


# Where a conversation's instructions end: other conversations begin with them too -----------------

RULES = "".join(f"Rule {number}: answer in {number} words.\n" for number in range(120))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_the_rules_are_what_other_conversations_begin_with(path: str):
    def conversation(*said: str) -> tuple[list[int], int]:
        roles = ("user", "assistant")
        turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
        system = {"system": RULES} if path != CHAT else {}
        told = turns if system else [{"role": "system", "content": RULES}, *turns]
        found = asked(path, {"messages": told, "max_tokens": 9, **system})
        return found.tokens, found.params.shared_prefix

    (first, rules), (second, same) = conversation("Rule 1"), conversation("Hi", "Yes?", "Why?")

    assert rules == same > 500
    assert first[:rules] == second[:rules]
    assert first[rules] != second[rules]


@pytest.mark.parametrize("body", [{"messages": [{"role": "user", "content": RULES}]}, {"messages": []}])
def test_where_there_are_no_long_instructions_no_end_is_told(body: dict[str, Any]):
    body["messages"] = [{"role": "system", "content": "Be brief."}, *body["messages"], {"role": "user", "content": "?"}]

    assert asked(CHAT, body).params.shared_prefix == 0
