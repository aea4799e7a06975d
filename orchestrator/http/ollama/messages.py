"""Messages of Ollama's API as messages of a chat. Pure.

Ollama's calls have no ids, and a result names its function; in a chat a result names the id of its call.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.http.errors import ApiError, unsupported

Message = dict[str, Any]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises ApiError for a message with images, and for one whose calls are malformed."""
    found: list[Message] = []
    open_calls: list[tuple[str, str]] = []
    """Name and id of calls that have no result yet."""
    for message in messages:
        if message.get("images"):
            raise unsupported("messages", "A message has images, and these models read only text: leave them out.")
        kept: Message = {"role": message.get("role"), "content": message.get("content") or ""}
        if message.get("thinking"):
            kept["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            kept["tool_calls"] = calls = [_call(call, len(found), place) for place, call in _numbered(message)]
            open_calls += [(call["function"]["name"], call["id"]) for call in calls]
        if kept["role"] == "tool":
            kept |= _answered(message, open_calls)
        found.append(kept)
    return found


def _numbered(message: Mapping[str, Any]) -> Sequence[tuple[int, Any]]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise _wrong("The tool_calls of a message are no list.")
    return list(enumerate(calls))


def _call(call: Any, turn: int, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong("Each of a message's tool_calls must have a function with a name.")
    called = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return {"id": f"call{turn:03}{place:02}", "type": "function", "function": called}


def _answered(message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """The id of the call that this result answers: the first open one of its name, or the first open one."""
    name = message.get("tool_name") or message.get("name")
    call = next((call for call in open_calls if call[0] == name), None)
    if call is None and name is None:
        call = next(iter(open_calls), None)
    if call is None:
        return {} if name is None else {"name": name}
    open_calls.remove(call)
    return {"name": call[0], "tool_call_id": call[1]}


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="messages")
