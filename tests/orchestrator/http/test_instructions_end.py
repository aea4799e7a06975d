"""The server tells the pipeline where a conversation's instructions end: other conversations begin with them too."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.text.chat_template import ChatTemplate
from tests.support.asked_server import CHAT, TEMPLATE, post
from tests.support.fake_pipeline import READY, FakePipeline

RULES = "".join(f"Rule {number}: answer in {number} words.\n" for number in range(120))
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def asked(body: dict[str, Any], path: str = CHAT, template: ChatTemplate = TEMPLATE) -> tuple[list[int], int]:
    """The prompt's tokens, and how many of them are the rules."""
    pipeline = FakePipeline(condition=replace(READY, context=8192))
    response = post(path, body, pipeline, template=template)
    assert response.status_code == 200, response.text
    ((tokens, params),) = pipeline.asked
    return list(tokens), params.shared_prefix


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_the_rules_are_what_other_conversations_begin_with(path: str):
    def conversation(*said: str) -> tuple[list[int], int]:
        roles = ("user", "assistant")
        turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
        system = {"system": RULES} if path != CHAT else {}
        told = turns if system else [{"role": "system", "content": RULES}, *turns]
        return asked({"messages": told, "max_tokens": 9, **system}, path)

    (first, rules), (second, same) = conversation("Rule 1"), conversation("Hi", "Yes?", "Why?")

    assert rules == same > 500
    assert first[:rules] == second[:rules]
    assert first[rules] != second[rules]


@pytest.mark.parametrize("body", [{"messages": [{"role": "user", "content": RULES}]}, {"messages": []}])
def test_where_there_are_no_long_instructions_no_end_is_told(body: dict[str, Any]):
    body["messages"] = [{"role": "system", "content": "Be brief."}, *body["messages"], {"role": "user", "content": "?"}]

    assert asked(body)[1] == 0
