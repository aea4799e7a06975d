"""The server tells the pipeline where a conversation's instructions end: other conversations begin with them too."""

from typing import Any

import pytest

from tests.support.asked_server import CHAT, asked

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
