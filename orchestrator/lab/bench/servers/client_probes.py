"""Probes of what particular clients send: Codex, Anthropic's and Ollama's clients. The model is the scripted pair's."""

import json
from typing import Any

from orchestrator.lab.bench.servers.answer_probes import PARAMETERS, asking
from orchestrator.lab.bench.servers.http_requests import Answer, Body, ask, at_route, chat
from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.scripted_pair import ANSWER, CUSTOM, CUSTOM_INPUT, ONE_CALL, PLAIN, THINK, THOUGHT
from orchestrator.lab.bench.servers.server_process import RunningServer

_RESPONSES, _MESSAGES, _OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
_FUNCTION = {"name": "add", "parameters": PARAMETERS}
_NAMESPACE = {"type": "namespace", "name": "sums", "tools": [{"type": "function", **_FUNCTION}]}
_CUSTOM = {"type": "custom", "name": "add", "description": "Adds."}
_RULE = "Answer in one sentence."


def clients() -> dict[str, Probe]:
    return {
        "the `developer` role": _developer,
        "Responses: a thought": lambda server: _respond(
            server, THINK, lambda items: [item["type"] for item in items] == ["reasoning", "message"]
        ),
        "Responses: a function of a namespace (Codex)": lambda server: _respond(
            server,
            PLAIN,
            lambda items: [(item.get("namespace"), item.get("name")) for item in _calls(items)] == [("sums", "add")],
            tools=[_NAMESPACE],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=256,
        ),
        "Responses: a custom tool (Codex)": lambda server: _respond(
            server,
            CUSTOM,
            lambda items: [(item["type"], item.get("input")) for item in items] == [("custom_tool_call", CUSTOM_INPUT)],
            tools=[_CUSTOM],
        ),
        "Responses: `previous_response_id`": _continued,
        "Messages: a thought": lambda server: at_route(
            _ask_messages(server, THINK),
            lambda answer: [block["type"] for block in answer.body["content"]] == ["thinking", "text"],
        ),
        "Messages: a call": lambda server: at_route(
            _ask_messages(server, ONE_CALL, tools=[{"name": "add", "input_schema": PARAMETERS}]),
            lambda answer: answer.body["content"][-1].get("input") == {"a": 1, "b": 1},
        ),
        "Messages: errors in Anthropic's form": _anthropic_error,
        "Ollama: a thought": lambda server: at_route(
            _ask_ollama(server, THINK), lambda answer: answer.body["message"].get("thinking") == "".join(THOUGHT)
        ),
        "Ollama: a call": lambda server: at_route(
            _ask_ollama(server, ONE_CALL, tools=[{"type": "function", "function": _FUNCTION}]),
            lambda answer: answer.body["message"]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1},
        ),
        "Ollama: a stream": lambda server: at_route(
            _ask_ollama(server, PLAIN, stream=True), lambda answer: _lines_say(str(answer.body))
        ),
    }


def _developer(server: RunningServer) -> str:
    """Whether the model is given the message, by the length of the prompt."""

    def tokens(*before: Body) -> int | None:
        answer = chat(server, messages=[*before, *asking(PLAIN)])
        return answer.body["usage"]["prompt_tokens"] if answer is not None and answer.status == 200 else None

    found = tokens({"role": "developer", "content": _RULE})
    if found is None:
        return "refused"
    return "done" if found == tokens({"role": "system", "content": _RULE}) else "left out"


def _respond(server: RunningServer, word: str, honoured: Any, **fields: Any) -> str:
    body = {"input": word, "temperature": 0, "max_output_tokens": 64, **fields}
    return at_route(ask(server, _RESPONSES, body), lambda answer: honoured(answer.body["output"]))


def _calls(items: list[Body]) -> list[Body]:
    return [item for item in items if item["type"] == "function_call"]


def _continued(server: RunningServer) -> str:
    """Done if the earlier turns are part of the prompt."""
    first = ask(server, _RESPONSES, {"input": PLAIN, "max_output_tokens": 16})
    if first is None or first.status != 200:
        return at_route(first, lambda _: True)
    body = {"input": PLAIN, "max_output_tokens": 16, "previous_response_id": first.body["id"]}

    def longer(answer: Answer) -> bool:
        return answer.body["usage"]["input_tokens"] > first.body["usage"]["total_tokens"]

    return at_route(ask(server, _RESPONSES, body), longer)


def _ask_messages(server: RunningServer, word: str, **fields: Any) -> Answer | None:
    return ask(server, _MESSAGES, {"messages": asking(word), "max_tokens": 64, "temperature": 0, **fields})


def _anthropic_error(server: RunningServer) -> str:
    answer = _ask_messages(server, "word " * 3000)
    if answer is None or answer.status == 404:
        return at_route(answer, lambda _: True)
    known = isinstance(answer.body, dict) and answer.body.get("type") == "error"
    told = known and answer.body["error"]["message"].startswith("prompt is too long: ")
    return "done" if told and answer.status == 400 else "another form"


def _ask_ollama(server: RunningServer, word: str, **fields: Any) -> Answer | None:
    body = {"model": "demo", "messages": asking(word), "stream": False, "options": {"temperature": 0}}
    return ask(server, _OLLAMA, {**body, **fields})


def _lines_say(text: str) -> bool:
    lines = [json.loads(line) for line in text.splitlines()]
    said = "".join(line["message"]["content"] for line in lines)
    return said == "".join(ANSWER) and [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
