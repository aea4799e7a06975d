"""One table of refusals: what can't be answered is named before anything is generated, in the words of its API."""

from typing import Any

import pytest

from tests.orchestrator.http.test_structured_output import ADD, FORM, tool
from tests.support.asked_server import BODIES, CHAT, COMPLETIONS, GENERATE, KEY, MESSAGES, OLLAMA, RESPONSES, post
from tests.support.fake_pipeline import FakePipeline

TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
NAMESPACE = {"type": "namespace", "name": "a", "tools": [{"name": "b"}]}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {**FORM, "json_schema": {"schema": schema}}}


def said(content: Any, role: Any = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    # The route, what is changed of a request that is answered, and what the error names.
    (COMPLETIONS, {"prompt": None}, None),
    (COMPLETIONS, {"prompt": 1}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1 << 20]}, "prompt"),
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"top_p": 2}, "top_p"),
    (COMPLETIONS, {"n": -1}, "n"),
    (COMPLETIONS, {"n": 17}, "n"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": 1000}}, "logit_bias"),
    (COMPLETIONS, {"stop": [1]}, "stop"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    *((CHAT, {"messages": said("x", role)}, "messages") for role in ("nobody", [], {}, 3, None)),
    *((CHAT, form(schema), "response_format") for schema in ({"type": "nonsense"}, {"not": {}}, [1])),
    (CHAT, form({"enum": ["x" * 70_000]}), "response_format"),
    (CHAT, form({"enum": ["\N{PILE OF POO}" * 6000]}), "response_format"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function"}], "tool_choice": "required"}, "tools"),
    (CHAT, {"tools": [tool("f", [1])], "tool_choice": "required"}, "tools"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"frequency_penalty": 2.5}, "frequency_penalty"),
    *((RESPONSES, {"input": given}, "input") for given in (None, "", [], 3, [{"content": "a"}])),
    (RESPONSES, {"input": "", "max_output_tokens": 17}, "input"),
    (RESPONSES, {"temperature": "hot"}, "temperature"),
    (RESPONSES, {"stream": 1}, "stream"),
    (RESPONSES, {"tools": [{"type": "custom"}]}, "tools"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
    *((RESPONSES, {"input": [{"type": "additional_tools", "tools": tools}]}, "input") for tools in (None, {}, ["a"])),
    (RESPONSES, {"tools": [{"type": "namespace", "tools": TOOLS}]}, "tools"),
    (RESPONSES, {"tools": [{"name": "a__b"}, NAMESPACE]}, "tools"),
    (RESPONSES, {"tools": [*TOOLS, {"type": "custom", "name": "add"}]}, "tools"),
    (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"top_logprobs": 200}, "top_logprobs"),
    (RESPONSES, {"max_output_tokens": "b"}, "max_output_tokens"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": said("a", "nobody")}, "role"),
    (MESSAGES, {"temperature": "hot"}, "temperature"),
    (MESSAGES, {"tool_choice": {"type": []}}, ""),
    (MESSAGES, {"stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    (OLLAMA, {"options": {"temperature": "hot"}}, "temperature"),
    (OLLAMA, {"options": {"temperature": -1}}, "temperature"),
    (OLLAMA, {"keep_alive": "soon"}, "5m"),
    (OLLAMA, {"keep_alive": 10**400}, "5m"),
]
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"stream": True, "echo": True, "logprobs": 1}, "stream"),
    (COMPLETIONS, {"stream": True, "echo": True, "max_tokens": 0}, "stream"),
    (COMPLETIONS, {"suffix": "}"}, "suffix"),
    (COMPLETIONS, {"response_format": {"type": "verse"}}, "response_format"),
    (CHAT, {"response_format": {"type": "verse"}}, "response_format"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"tool_choice": "always"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "custom"}}, "tool_choice"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": said([{"type": "text"}])}, "messages"),
    (CHAT, {"messages": said([{"type": "input_audio", "input_audio": {}}])}, "messages"),
    (CHAT, {"messages": [*said("Hi"), *said("Yes?", "assistant"), *said([{"type": "image_url"}])]}, "messages"),
    (RESPONSES, {"input": said([{"type": "input_image", "image_url": "x"}])}, "input"),
    (RESPONSES, {"input": said([{"type": ["input_text"]}])}, "input"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"top_logprobs": 2, "tools": TOOLS}, "top_logprobs"),
    (RESPONSES, {"text": {"format": {"type": "b"}}}, "text"),
    (MESSAGES, {"messages": said([IMAGE])}, "read only text"),
    (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    (OLLAMA, {"messages": [{"role": "user", "content": "Look.", "images": ["aGk="]}]}, "read only text"),
    (OLLAMA, {"format": "yaml"}, "schema"),
    (GENERATE, {"suffix": "a"}, "suffix"),
    (GENERATE, {"system": "Be brief.", "raw": True}, "system message"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
]
MORE = {"text": "text.format", "max_output_tokens": "max_output_tokens"}
"""How sentences begin that speak of a field as their API calls it."""


@pytest.mark.parametrize(("path", "change", "named"), [*WRONG, *UNSUPPORTED])
def test_what_can_not_be_answered_is_named_before_anything_is_generated(path: str, change: Any, named: str | None):
    pipeline = FakePipeline()

    response = post(path, {**BODIES[path], **change}, pipeline)

    assert (response.status_code, pipeline.asked) == (400, [])
    error = response.json()["error"]
    if path in (OLLAMA, GENERATE):
        assert (named or "") in error
    elif path == MESSAGES:
        assert error["type"] == "invalid_request_error"
        assert (named or "") in error["message"]
    else:
        assert (error["type"], error["param"]) == ("invalid_request_error", named)
        assert (error["code"] == "unsupported_parameter") == ((path, change, named) in UNSUPPORTED)
        assert path != RESPONSES or error["message"].startswith(MORE.get(named or "", ""))


@pytest.mark.parametrize(
    ("change", "headers", "status", "kind"),
    [
        ({"model": "other"}, None, 404, "not_found_error"),
        ({}, {"x-api-key": "wrong"}, 401, "authentication_error"),
        ({}, {"x-api-key": KEY}, 200, None),
    ],
)
def test_clients_of_anthropic_s_api_read_the_kind_of_an_error(change: Any, headers: Any, status: int, kind: str | None):
    response = post(MESSAGES, {**BODIES[MESSAGES], **change}, headers=headers)

    assert (response.status_code, response.json().get("error", {}).get("type")) == (status, kind)
