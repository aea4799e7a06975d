"""A thinking model behind `launch-pipeline serve`: with speculation, the thought keeps to its budget, and schemas and
calls come behind it. Real processes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.text.tokenizer import TextCodec
from tests.end_to_end.test_http_serve import CHAT, Serving, started
from tests.support.models.thinking_pair import write_thinking_pair
from tests.support.paths import DEMO_TARGET

BUDGET = 6
ASKED = {
    "messages": [{"role": "user", "content": "def add"}],
    "temperature": 1.0,
    "top_p": 1.0,
    "seed": 1,
    "max_tokens": 60,
    "thinking_budget": BUDGET,
}
CHOICES = {"enum": ["left", "right"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": CHOICES}}
PICK = {"type": "object", "properties": {"one": CHOICES}, "required": ["one"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": PICK}}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    target, draft = write_thinking_pair(tmp_path_factory.mktemp("models"))
    with started("--target", str(target), "--draft", str(draft)) as server:
        yield server


def message(serving: Serving, **more: Any) -> Any:
    """Of an answer that is the same in a stream, but for white space beside calls."""
    (choice,) = serving.post(CHAT, **ASKED, **more)["choices"]
    assert serving.streamed(CHAT, **ASKED, **more).strip() == (choice["message"]["content"] or "").strip()
    return choice["message"]


@pytest.mark.thorough
def test_an_end_inside_a_thought_ends_the_answer_or_the_thought(serving: Serving):
    (end,) = TextCodec(DEMO_TARGET).eos
    asked = {**ASKED, "thinking_budget": None, "logit_bias": {str(end): 7}}
    kept, closed = (serving.post(CHAT, **asked, reasoning_eos=eos) for eos in ("keep", "close"))

    assert not kept["choices"][0]["message"]["content"]
    assert "inside a thought" in kept["warnings"][0]
    assert closed["choices"][0]["message"]["content"] == serving.streamed(CHAT, **asked, reasoning_eos="close") != ""
    assert "warnings" not in closed


@pytest.mark.thorough
def test_thoughts_keep_to_their_budget_and_answers_to_their_form(serving: Serving):
    free = message(serving)
    schema = message(serving, response_format=FORM)
    call = message(serving, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    either = message(serving, tools=TOOLS, response_format=FORM)
    counted = serving.post(CHAT, **ASKED)["usage"]["completion_tokens_details"]["reasoning_tokens"]

    assert free["reasoning_content"] == schema["reasoning_content"]
    assert free["content"]
    assert 0 < counted <= BUDGET
    assert json.loads(schema["content"]) in CHOICES["enum"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"])["one"] in CHOICES["enum"]
    assert "tool_calls" in either or json.loads(either["content"]) in CHOICES["enum"]
