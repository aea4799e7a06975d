"""Laws of what Codex sends beside chats: items of tools that are not run here, probes, and demands for a summary."""

from typing import Any

import httpx
import pytest
from msgspec import structs

from orchestrator.text.chat_template import ChatTemplate
from tests.support.asked_server import asked, get, post, talk
from tests.support.dialects import RESPONSES as RESPONSES_API
from tests.support.fake_pipeline import READY, FakePipeline

RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
HI: dict[str, Any] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
ACTION = {"type": "exec", "command": ["ls"]}


@pytest.fixture
def chatml(templates: dict[str, ChatTemplate]) -> ChatTemplate:
    return templates["chatml"]


ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}}],
     "<assistant>[web_search_call left out]"),
    ([{"type": "image_generation_call", "id": "ig_1", "result": "aGk="}],
     "<assistant>[image_generation_call left out]"),
    ([{"type": "item_reference", "id": "msg_1"}], "<assistant>[item_reference left out]"),
    ([{"type": "compaction", "encrypted_content": "gAAAA"}], "<assistant>[compaction left out]"),
    ([{"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []}],
     "<assistant>[mcp_list_tools left out]"),
    ([{"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed", "action": ACTION},
      {"type": "local_shell_call_output", "call_id": "c1", "output": "a.txt"}],
     '<assistant>[local_shell({"type": "exec", "command": ["ls"]})c1]<tool>a.txt'),
    ([{"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "x"}},
      {"type": "tool_search_output", "call_id": "c1", "tools": []}],
     '<assistant>[tool_search({"query": "x"})c1]<tool>[tool_search_output left out]'),
    ([{"type": "mcp_call", "id": "mcp_1", "name": "add", "arguments": '{"a": 1}', "output": "4"}],
     '<assistant>[add({"a": 1})mcp_1]<tool>4'),
    ([{"type": "mcp_call", "id": "mcp_1", "name": "add", "arguments": '{"a": 1}', "error": "No."}],
     '<assistant>[add({"a": 1})mcp_1]<tool>No.'),
    ([{"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "c1", "output": None}], "<assistant>[add({})c1]<tool>"),
    ([{"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "c1", "output": {"sum": 4}}],
     '<assistant>[add({})c1]<tool>{"sum":4}'),
    ([{"type": "computer_call", "call_id": "c1", "action": {"type": "click"}},
      {"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot", "image_url": "x"}}],
     '<assistant>[computer({"type": "click"})c1]<tool>[computer_screenshot left out]'),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}], ""),
    ([{"role": "assistant", "content": None}, {"role": "assistant"}], "<assistant><assistant>"),
]  # fmt: skip


@pytest.mark.parametrize(("items", "text"), ITEMS)
def test_items_of_tools_that_are_not_run_here_are_read_or_a_placeholder(
    chatml: ChatTemplate, items: list[dict[str, Any]], text: str
):
    found = asked(RESPONSES, {"input": [HI, *items, HI]}, chatml)

    assert found.prompt == f"<user>Hi{text}<user>Hi"
    assert bool(found.warnings) == ("left out" in text)


@pytest.mark.parametrize("given", [{"input": []}, {"input": ""}, {}, {"input": [{"role": "user", "content": None}]}])
def test_a_probe_with_a_tiny_limit_is_answered(chatml: ChatTemplate, given: dict[str, Any]):
    assert asked(RESPONSES, {"max_output_tokens": 16, **given}, chatml).prompt == "<user>"
    assert asked(RESPONSES, {"instructions": "Say hi."}, chatml).prompt == "<system>Say hi."


def test_models_have_the_list_that_codex_reads():
    listed = get("/v1/models?client_version=0.169.0").json()

    assert (listed["models"], listed["data"][0]["id"]) == ([], "demo")
    assert "models" not in get("/v1/models").json()


def test_a_conversation_is_compacted_to_a_summary_that_later_requests_read(chatml: ChatTemplate):
    pipeline = FakePipeline(condition=structs.replace(READY, context=4096))
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]}

    async def ask(client: httpx.AsyncClient) -> tuple[Any, Any]:
        made = (await client.post(COMPACT, json={"model": "demo", "input": [HI, said], "stream": True})).json()
        return made, (await client.post(RESPONSES, json={"input": [*made["output"], HI]})).json()

    made, answer = talk(ask, pipeline, template=chatml)

    demanded, later = (chatml.codec.decode(prompt) for prompt, _ in pipeline.asked)
    assert demanded.startswith("<user>Hi<assistant>Yes?<user>Summarize this conversation")
    assert made["object"] == "response.compaction"
    assert [item["type"] for item in made["output"]] == ["message", "compaction"]
    assert made["usage"]["output_tokens"] == 5
    assert later == "<user>Hi<user>Summary of the conversation so far:\nHello<user>Hi"
    assert "warnings" not in answer


TRIGGER = {"type": "compaction_trigger"}


@pytest.mark.parametrize("ends", ["stop", "length"])
@pytest.mark.parametrize("streamed", [True, False])
def test_an_item_at_the_end_asks_for_exactly_one_compaction(chatml: ChatTemplate, streamed: bool, ends: Any):
    pipeline = FakePipeline(condition=structs.replace(READY, context=4096), ends=(ends, None))
    form = {"format": {"type": "json_object"}}
    question = {"input": [HI, TRIGGER], "stream": streamed, "text": form, "store": True}

    async def ask(client: httpx.AsyncClient) -> tuple[Any, Any]:
        answer = await client.post(RESPONSES, json=question)
        found = RESPONSES_API.events(answer)[-1]["response"] if streamed else answer.json()
        later = await client.post(RESPONSES, json={"previous_response_id": found["id"], "input": [HI]})
        return answer, later.json()

    answer, _ = talk(ask, pipeline, template=chatml)

    read, later = (chatml.codec.decode(prompt) for prompt, _ in pipeline.asked)
    assert read.startswith("<user>Hi<user>Summarize this conversation")
    assert later == "<user>Hi<user>Summary of the conversation so far:\nHello<user>Hi"
    response = RESPONSES_API.events(answer)[-1]["response"] if streamed else answer.json()
    # Codex takes an incomplete response for a failure.
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["compaction"]
    assert ("warnings" in response) == (ends == "length")
    assert pipeline.asked[0][1].grammar is None
    if streamed:
        kinds = [event["type"].removeprefix("response.") for event in RESPONSES_API.events(answer)]
        assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]


def test_a_long_summary_gives_signs_of_life(chatml: ChatTemplate):
    pipeline = FakePipeline(lambda _: ["x"] * 200, condition=structs.replace(READY, context=4096))
    answer = post(RESPONSES, {"input": [HI, TRIGGER], "stream": True}, pipeline, template=chatml)

    # A slow server sends more of them.
    assert [event["type"] for event in RESPONSES_API.events(answer)].count("response.in_progress") >= 1 + 200 // 64
