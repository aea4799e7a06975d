"""Laws of warnings: an answer says what of its request the model did not read."""

from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from orchestrator.text.chat_template import ChatTemplate
from tests.orchestrator.http import test_anthropic as anthropic
from tests.orchestrator.http import test_responses as responses
from tests.orchestrator.http.test_rules import CHAT, chunks, post, talk
from tests.orchestrator.http.test_thinking import model

HI = {"role": "user", "content": "Hi"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "4"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "4"}
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [HI, TOOL, TOOL]}),
    (responses.RESPONSES, {"input": [HI, *({"type": "function_call_output", "call_id": "1", "output": "4"},) * 2]}),
    (anthropic.MESSAGES, {"max_tokens": 5, "messages": [HI, {"role": "user", "content": [RESULT, RESULT]}]}),
]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Of a model whose template drops roles that it does not know."""
    source = (
        "{% for m in messages if m.role in ('system', 'user', 'assistant') %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    )
    return model(tmp_path_factory.mktemp("forgetful"), source)


@pytest.mark.parametrize(("path", "question"), QUESTIONS)
def test_an_answer_says_which_messages_the_model_did_not_read(
    forgetful: ChatTemplate, path: str, question: dict[str, Any]
):
    (warning,) = post(path, question, template=forgetful).json()["warnings"]

    assert "2 message(s) with the role 'tool'" in warning


def test_the_beginning_of_a_stream_says_so_too(forgetful: ChatTemplate):
    (chat, asked), (responding, items), (messages, blocks) = QUESTIONS

    first, *others = chunks(post(chat, {**asked, "stream": True, "n": 2}, template=forgetful))
    created = responses.events(post(responding, {**items, "stream": True}, template=forgetful))[0]
    started = anthropic.events(post(messages, {**blocks, "stream": True}, template=forgetful))[0]

    assert all("'tool'" in told["warnings"][0] for told in (first, created["response"], started["message"]))
    assert not any("warnings" in chunk for chunk in others)


def test_answers_with_warnings_are_counted_in_the_log_and_in_the_metrics(forgetful: ChatTemplate):
    async def ask(client: httpx.AsyncClient) -> str:
        for _ in range(11):
            await client.post(CHAT, json={"messages": [HI, TOOL]})
        return (await client.get("/metrics")).text

    with capture_logs() as logged:
        figures = talk(ask, template=forgetful)

    assert [(entry["kind"], entry["requests"]) for entry in logged] == [("unread", 1), ("unread", 10)]
    assert 'launch_pipeline_warned_requests_total{kind="unread"} 11.0' in figures.splitlines()
