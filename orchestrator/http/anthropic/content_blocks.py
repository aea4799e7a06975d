"""Messages of Anthropic's API as messages of a chat. Pure.

There a message is a list of blocks, and a user's may hold results of tools; here each result is a message of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.http.errors import ApiError, unsupported

Block = Mapping[str, Any]
Message = dict[str, Any]
_FORGOTTEN = ("thinking", "redacted_thinking")
"""What models thought in earlier turns is not shown to them again, as in the API itself."""


def messages(system: Any, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises ApiError for a block that can't be read, or is no text."""
    found = [{"role": "system", "content": _content(system)}] if system else []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "user":
            found += _asked(_blocks(content))
        elif role == "assistant":
            found.append(_said(_blocks(content)))
        elif role == "system":
            found.append({"role": "system", "content": _content(content)})
        else:
            raise _wrong(f"A message's role is {role!r} and must be user, assistant or system.")
    if found and found[-1]["role"] == "assistant":
        raise unsupported("messages", "An answer can't be begun for the model: end with a message of the user's.")
    return found


def function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chats have it. Raises ApiError for one that Anthropic's own servers would run."""
    if tool.get("type", "custom") not in ("custom", None):
        raise unsupported("tools", f"Tools of type {tool['type']!r} are not run here: offer tools of your own.")
    called = {"name": "name", "description": "description", "strict": "strict", "input_schema": "parameters"}
    known = {ours: tool[name] for name, ours in called.items() if tool.get(name) is not None}
    return {"type": "function", "function": known}


def _asked(blocks: Sequence[Block]) -> list[Message]:
    """Results of tools, and what the user says, in the order in which they come."""
    found: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _content(block.get("content") or "")
            failed = "Error: " if block.get("is_error") else ""
            found.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id"), "content": failed + content})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += _words(block)
        else:
            found.append({"role": "user", "content": _words(block)})
    return found


def _said(blocks: Sequence[Block]) -> Message:
    words = [_words(block) for block in blocks if block.get("type") not in ("tool_use", *_FORGOTTEN)]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    message: Message = {"role": "assistant", "content": "".join(words)}
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": _text(block, "name"), "arguments": arguments}
    return {"id": _text(block, "id"), "type": "function", "function": function}


def _content(content: Any) -> str:
    return "".join(map(_words, _blocks(content)))


def _blocks(content: Any) -> Sequence[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise _wrong("The content of a message is neither a text nor a list of blocks.")
    return content


def _words(block: Block) -> str:
    if block.get("type") != "text":
        raise unsupported(
            "messages", f"A message has a block of type {block.get('type')!r}, which can't be read there: send text."
        )
    return _text(block, "text")


def _text(block: Block, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"A block of type {block.get('type')!r} has no text as its {name}: add it.")
    return value


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="messages")
