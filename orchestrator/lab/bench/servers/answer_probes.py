"""Probes of what a server makes of a model's text: thoughts and tool calls. The model is the scripted pair's."""

import json
from collections.abc import Callable
from typing import Any

from orchestrator.lab.bench.servers.http_requests import Answer, Body, chat, effect, streamed_chat
from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.scripted_pair import (
    AFTER,
    ANSWER,
    BEFORE,
    CUT_AFTER,
    MALFORMED,
    ONE_CALL,
    PLAIN,
    TEXT_AROUND,
    THINK,
    THOUGHT,
    TWO_CALLS,
    WRONG,
)
from orchestrator.lab.bench.servers.server_process import RunningServer

_BUDGET = 4
_NUMBER = {"enum": [1, 2, 3, 4]}
PARAMETERS = {
    "type": "object",
    "properties": {"a": _NUMBER, "b": _NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_STRICT, _LOOSE = (
    [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": strict}}]
    for strict in (True, False)
)
_NAMED = {"type": "function", "function": {"name": "add"}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS, "strict": True}}
_NO_THINKING = {"enable_thinking": False}


def asking(word: str) -> list[Body]:
    """A conversation that makes the model write the text of this name."""
    return [{"role": "user", "content": word}]


def thinking() -> dict[str, Probe]:
    return {
        "a thought": lambda server: _thought(_ask(server, THINK)),
        "a thought, streamed": lambda server: _where(streamed_chat(server, messages=asking(THINK), max_tokens=64)),
        "`chat_template_kwargs`": _thoughtless(chat_template_kwargs=_NO_THINKING),
        "`enable_thinking: false`": _thoughtless(**_NO_THINKING),
        '`reasoning_effort: "none"`': _thoughtless(reasoning_effort="none"),
        "`thinking_budget`": lambda server: effect(_ask(server, THINK, thinking_budget=_BUDGET), _keeps_to_budget),
        "a thought, then JSON by a schema": lambda server: effect(
            _ask(server, THINK, response_format=_FORMAT),
            lambda answer: bool(_reasoning(answer.message)) and fits(answer.message["content"]),
        ),
    }


def tool_calls() -> dict[str, Probe]:
    return {
        "two calls in an answer": lambda server: effect(
            _call(server, TWO_CALLS), lambda answer: _sums(answer.message) == [(2, 2), (3, 3)]
        ),
        "two calls, streamed": _streams_two,
        "text before and behind a call": lambda server: effect(_call(server, TEXT_AROUND), _has_text, "lost"),
        "a malformed call": lambda server: _remains(_call(server, MALFORMED)),
        "a call before one that `max_tokens` cuts": lambda server: effect(
            _cut(server), lambda answer: _sums(answer.message) == [(2, 2)]
        ),
        "the beginning of the cut call": lambda server: _remains(_cut(server)),
        "the result of a call": lambda server: effect(
            chat(server, messages=_with_result(), tools=_LOOSE),
            lambda answer: answer.message["content"] == "".join(ANSWER),
        ),
        '`tool_choice: "required"`, where the model would answer': _forced(tool_choice="required"),
        "`tool_choice`, a function's name": _forced(tool_choice=_NAMED),
        '`tool_choice: "none"`, where the model would call': lambda server: effect(
            _call(server, ONE_CALL, tool_choice="none"), lambda answer: not answer.message.get("tool_calls")
        ),
        "`parallel_tool_calls: false`": lambda server: effect(
            _call(server, TWO_CALLS, parallel_tool_calls=False), lambda answer: _sums(answer.message) == [(2, 2)]
        ),
        "`strict`, where the model would write other arguments": lambda server: effect(
            _ask(server, WRONG, tools=_STRICT), lambda answer: _calls_fit(answer.message)
        ),
        "`tools` with `response_format`": lambda server: effect(
            _call(server, PLAIN, response_format=_FORMAT),
            lambda answer: _calls_fit(answer.message) or fits(answer.message["content"]),
        ),
    }


def fits(text: str | None) -> bool:
    """Whether a text is a value of PARAMETERS."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"a", "b"} and {*value.values()} <= {*_NUMBER["enum"]}


def _ask(server: RunningServer, word: str, **fields: Any) -> Answer | None:
    return chat(server, **{"messages": asking(word), "max_tokens": 64, **fields})


def _call(server: RunningServer, word: str, **fields: Any) -> Answer | None:
    return _ask(server, word, tools=_LOOSE, **fields)


def _thought(answer: Answer | None) -> str:
    refused = effect(answer, lambda _: True)
    return _where(answer.message) if answer is not None and refused == "done" else refused


def _where(message: Body) -> str:
    told = [name for name in ("reasoning_content", "reasoning") if message.get(name) == "".join(THOUGHT)]
    return f"`{told[0]}`" if told and message["content"] == "".join(ANSWER) else "in the text"


def _reasoning(message: Body) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""


def _thoughtless(**fields: Any) -> Probe:
    """Done if the answer comes without a thought."""
    return lambda server: effect(
        _ask(server, THINK, **fields),
        lambda answer: answer.message["content"] == "".join(ANSWER) and not _reasoning(answer.message),
    )


def _keeps_to_budget(answer: Answer) -> bool:
    whole = answer.message["content"] == "".join(ANSWER)
    return whole and _reasoning(answer.message) == "".join(THOUGHT[:_BUDGET])


def _sums(message: Body) -> list[tuple[Any, Any]]:
    """What the calls of `add` would add."""
    found = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return [(arguments.get("a"), arguments.get("b")) for arguments in found]


def _calls_fit(message: Body) -> bool:
    calls = message.get("tool_calls") or ()
    return bool(calls) and all(fits(call["function"]["arguments"]) for call in calls)


def _streams_two(server: RunningServer) -> str:
    message = streamed_chat(server, messages=asking(TWO_CALLS), max_tokens=64, tools=_LOOSE)
    numbered = [call.get("index") for call in message["tool_calls"]] == [0, 1]
    return "done" if numbered and _sums(message) == [(2, 2), (3, 3)] else "lost"


def _has_text(answer: Answer) -> bool:
    text = answer.message["content"] or ""
    return BEFORE.strip() in text and AFTER.strip() in text and _sums(answer.message) == [(4, 4)]


def _cut(server: RunningServer) -> Answer | None:
    return _call(server, TWO_CALLS, max_tokens=CUT_AFTER)


def _remains(answer: Answer | None) -> str:
    """What becomes of a call that can't be read."""
    return effect(answer, lambda answer: '"add"' in (answer.message["content"] or ""), "lost").replace("done", "text")


def _forced(**fields: Any) -> Probe:
    return lambda server: effect(_call(server, PLAIN, **fields), lambda answer: _calls_fit(answer.message))


def _with_result() -> list[Body]:
    call = {"id": "one", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    said: Callable[..., Body] = dict
    return [
        *asking(ONE_CALL),
        said(role="assistant", content=None, tool_calls=[call]),
        said(role="tool", tool_call_id="one", content=PLAIN),
    ]
