"""Messages of Ollama's API as messages of a chat. Pure.

Ollama's calls have no ids, and a result names its function; in a chat a result names the id of its call.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from orchestrator.http.errors import ApiError, unsupported

Message = dict[str, Any]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises ApiError for a message with images, and for one whose calls are malformed."""
    found: list[Message] = []
    open_calls = _OpenCalls()
    for message in messages:
        if message.get("images"):
            raise unsupported("messages", "A message has images, and these models read only text: leave them out.")
        kept: Message = {"role": message.get("role"), "content": message.get("content") or ""}
        if message.get("thinking"):
            kept["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            kept["tool_calls"] = [open_calls.add(_function(call)) for call in _calls(message)]
        if kept["role"] == "tool":
            kept |= open_calls.answered(message.get("tool_name") or message.get("name"))
        found.append(kept)
    return found


class _OpenCalls:
    """Calls that have no result yet, in their order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._names: OrderedDict[str, str] = OrderedDict()
        """By id."""
        self._ids: dict[str, deque[str]] = defaultdict(deque)
        """By name."""

    def add(self, function: dict[str, Any]) -> dict[str, Any]:
        """The call with its id. Mistral's templates read only ids of nine letters and digits."""
        id, name = f"call{next(self._numbers):05}", function["name"]
        self._names[id] = name
        self._ids[name].append(id)
        return {"id": id, "type": "function", "function": function}

    def answered(self, name: Any) -> dict[str, Any]:
        """Name and id of the call that a result for `name` answers: the first one of that name, or for None the first
        one."""
        if name is None:
            name = next(iter(self._names.values()), None)
        ids = self._ids.get(name) if isinstance(name, str) else None
        if not ids:
            return {} if name is None else {"name": name}
        id = ids.popleft()
        del self._names[id]
        return {"name": name, "tool_call_id": id}


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise _wrong("The tool_calls of a message are no list.")
    return calls


def _function(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong("Each of a message's tool_calls must have a function with a name.")
    return {"name": function["name"], "arguments": function.get("arguments") or {}}


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="messages")
