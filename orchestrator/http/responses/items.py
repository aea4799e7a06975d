"""Items of the Responses API as messages of a chat. Pure.

In the Responses API a call is an item, in a chat it is part of the assistant's message: adjacent ones are joined.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.http.errors import ApiError, unsupported
from orchestrator.http.responses.tools import custom_arguments, joined_name

Item = Mapping[str, Any]
Message = dict[str, Any]
_THOUGHTS = ("reasoning_text", "summary_text", "text")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages(items: Iterable[Item]) -> list[Message]:
    """The messages of a chat. Raises ApiError for a malformed item or one that is not text."""
    found: list[Message] = []
    thoughts: list[str] = []
    for item in items:
        match item.get("type") or "message":
            case "reasoning":
                thoughts.append(_reasoning(item))
                continue
            case "message":
                found.append({"role": _text(item, "role"), "content": _content(item.get("content"))})
            case "function_call":
                _add_call(found, item, _text(item, "arguments"), any(thoughts))
            case "custom_tool_call":
                _add_call(found, item, custom_arguments(_text(item, "input")), any(thoughts))
            case "function_call_output" | "custom_tool_call_output":
                output = _content(item.get("output"))
                found.append({"role": "tool", "tool_call_id": _text(item, "call_id"), "content": output})
            case other:
                raise unsupported(
                    "input",
                    f"input has an item of type {other!r}: send messages, reasoning, calls of functions and of custom "
                    "tools, and their outputs.",
                )
        if any(thoughts) and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = "\n".join(filter(None, thoughts))
        thoughts = []
    return found


def _reasoning(item: Item) -> str:
    """The text of a reasoning item, or its summary; empty if it is encrypted."""
    parts = item.get("content") or item.get("summary") or ()
    if not isinstance(parts, list | tuple):
        return ""
    kept = [part for part in parts if isinstance(part, Mapping) and part.get("type") in _THOUGHTS]
    return "".join(_text(part, "text") for part in kept)


def _add_call(found: list[Message], item: Item, arguments: str, new: bool) -> None:
    """`new`: reasoning came before, which begins a message."""
    function = {"name": joined_name(_text(item, "name"), item.get("namespace")), "arguments": arguments}
    call = {"id": _text(item, "call_id"), "type": "function", "function": function}
    if found and found[-1]["role"] == "assistant" and not new:
        found[-1].setdefault("tool_calls", []).append(call)
    else:
        found.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ApiError(400, "An item of input has neither a text nor a list of parts.", param="input")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise unsupported("input", f"input has a part of type {kind!r}, and these models read only text: leave it out.")
    return _text(part, _TEXTS[kind])


def _text(item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(
            400, f"An item or part of input has no text as its {name}: add it.", code="invalid_value", param="input"
        )
    return value
