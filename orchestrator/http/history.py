"""Messages of a request, of any API, in the form that chat templates read: what clients send is mended here. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""What clients and templates call the reasoning of an assistant's message."""
_RESPONSES = "tool_responses"


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, both: bool = True, joined: bool = False, written: bool = False
) -> list[dict[str, Any]]:
    """The messages with the arguments of earlier calls as objects, as templates need them; clients send JSON text.
    Reasoning of earlier turns gets every name that templates know; templates that do not use it leave it out. The
    result of a call gets the name of its function.

    `both`: whether a message with calls may have a text and reasoning. gpt-oss' template refuses such a message; then
    its reasoning is left out. `joined`: results are `tool_responses` of the message with their calls, as the first
    templates of Gemma 4 have it. `written`: arguments stay JSON text, as DeepSeek's templates need them.
    """
    modern = _with_functions_as_tools(messages)
    found = _with_names([_with_reasoning(_with_calls(message, written), both) for message in modern])
    return _with_joined_results(found) if joined else found


def _with_functions_as_tools(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Calls and results of OpenAI's older API (`function_call`, the role `function`) as those of tools."""
    found: list[Mapping[str, Any]] = []
    id = None
    for place, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "assistant" and isinstance(call, Mapping) and not message.get("tool_calls"):
            id = f"call{place:05}"
            others = {name: value for name, value in message.items() if name != "function_call"}
            message = {**others, "tool_calls": [{"id": id, "type": "function", "function": call}]}
        elif message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": id}
        found.append(message)
    return found


def _with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(call.get("id"), str):
                names[call["id"]] = str(function.get("name"))
        id = message.get("tool_call_id")
        known = names.get(id) if message.get("role") == "tool" and isinstance(id, str) else None
        found.append(message if known is None else {"name": known, **message})
    return found


def _with_joined_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in messages:
        content = _joined_parts(message.get("content"))
        if message.get("role") == "tool" and isinstance(content, str) and found and found[-1].get("tool_calls"):
            response = {"name": message.get("name", "unknown"), "response": _object(content) or content}
            found[-1].setdefault(_RESPONSES, []).append(response)
        else:
            found.append({name: value for name, value in message.items() if name != _RESPONSES})
    return found


def _joined_parts(content: Any) -> Any:
    """The text of content that is a list of text parts; other content as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`; None if there is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _with_reasoning(message: dict[str, Any], both: bool) -> dict[str, Any]:
    found = next((text for name in _REASONING if isinstance(text := message.get(name), str) and text), None)
    rest = {name: value for name, value in message.items() if name not in _REASONING}
    if found is None or message.get("role") != "assistant":
        return rest
    if not both and message.get("tool_calls") and message.get("content"):
        return rest
    return {**rest, **dict.fromkeys(_REASONING, found)}


def _with_calls(message: Mapping[str, Any], written: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    convert = _with_written_arguments if written else _with_parsed_arguments
    return {**message, "tool_calls": [convert(call) for call in calls]}


def _with_written_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    written = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {**call, "function": {**function, "arguments": written}}


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
