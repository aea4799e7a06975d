"""Laws of schemas of tools that would take long: whatever a syntax makes of them takes bounded time."""

import time
from contextlib import suppress
from typing import Any

import pytest

from orchestrator.http.errors import ApiError
from orchestrator.http.openai.prompts import ChatPrompts
from orchestrator.http.openai.request import ChatRequest
from orchestrator.http.request_bodies import converted
from orchestrator.text.answer import bound_calls
from orchestrator.text.answer.parameters import Parameters
from protocol.messages.base import MAX_SCHEMA
from tests.orchestrator.http.test_bound_calls import Model, answering
from tests.orchestrator.http.test_structured_output import tool
from tests.support.asked_server import CHAT, HELLO, post

__all__ = ["answering"]


def twice(form: str) -> dict[str, Any]:
    """A schema that names another one twice, that a third one twice, and so on."""

    def naming(place: int) -> dict[str, Any]:
        other = {"$ref": f"#/$defs/d{place + 1}"}
        if form == "object":
            return {"type": "object", "properties": {"a": other, "b": other}}
        return {form: [other, other]}

    named = {**{f"d{place}": naming(place) for place in range(50)}, "d50": {"type": "string"}}
    return {"type": "object", "$defs": named, "properties": {"a": {"$ref": "#/$defs/d0"}}}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["anyOf", "allOf", "object"])
def test_schemas_that_name_others_twice_take_bounded_time(answering: Model, form: str):
    tools = [tool("f", twice(form))]
    demanded = converted({**HELLO, "tools": tools, "tool_choice": "required"}, ChatRequest)

    began = time.process_time()
    with suppress(ApiError):
        ChatPrompts(answering.template).render(demanded)
    answering.read(answering.syntax.written([("f", {"a": "x"})]), tools)

    # Following each reference would take 2 ** 50 steps.
    assert time.process_time() - began < 5


@pytest.mark.sampled(5)
def test_nothing_is_made_of_schemas_that_are_too_long(answering: Model, monkeypatch: pytest.MonkeyPatch):
    def made(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(bound_calls, "_relocated", made)
    monkeypatch.setattr(Parameters, "members", made)
    monkeypatch.setattr(Parameters, "json_schema", made)
    schema = {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(4_000)}}
    response = post(
        CHAT, {**HELLO, "tools": [tool("f", schema)], "tool_choice": "required"}, template=answering.template
    )

    assert response.status_code == 400
    assert "characters; the limit is 65,536." in response.text


@pytest.mark.sampled(5)
def test_definitions_are_not_repeated_for_each_parameter_without_limit(
    answering: Model, monkeypatch: pytest.MonkeyPatch
):
    numbers = {f"p{place}": {"type": "integer"} for place in range(1_000)}
    schema = {"type": "object", "$defs": {"long": {"enum": ["x" * 30_000]}}, "properties": numbers}
    asked = converted({**HELLO, "tools": [tool("f", schema)], "tool_choice": "required"}, ChatRequest)
    texts: list[str] = []
    write = Parameters.json_schema

    def written(parameters: Parameters, schema: Any = None) -> str:
        texts.append(write(parameters, schema))
        return texts[-1]

    monkeypatch.setattr(Parameters, "json_schema", written)
    with suppress(ApiError):
        ChatPrompts(answering.template).render(asked)

    assert sum(map(len, texts)) <= 2 * MAX_SCHEMA
