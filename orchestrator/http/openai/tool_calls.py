"""Calls of tools in what a model says, in the form that Hermes and Qwen models were taught. Pure.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Nothing forces a model to write a proper one;
what can't be read stays text.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.stop_scanner import StopScanner
from protocol.errors import InputError

_OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}


class _Said(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def taught(template: ChatTemplate) -> bool:
    """Whether the model's template tells it of tools, and to call them in this form."""
    try:
        text = template.text([{"role": "user", "content": ""}], [_PROBE]) if template.knows_tools else ""
    except InputError:
        return False
    return _OPEN in text and '"arguments"' in text


class ToolCallParser:
    """Parts one answer, as it comes, into text and the calls behind it."""

    def __init__(self, most: int | None) -> None:
        """`most`: calls that the client takes, None for any number."""
        self._most = most
        self._scanner = StopScanner([_OPEN])
        self._behind: str | None = None
        """From the first call on, once there is one."""

    def push(self, text: str) -> str:
        """What of it is text for certain."""
        if self._behind is not None:
            self._behind += text
            return ""
        held = self._scanner.held + text
        before, found = self._scanner.push(text)
        if found:
            self._behind = held[len(before) :]
        return before

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls; none if one of them is none."""
        if self._behind is None:
            return self._scanner.flush(), []
        calls = [_call(said) for said in _CALL.findall(self._behind)]
        if any(call is None for call in calls):
            return self._behind, []
        return "", [call for call in calls if call is not None][: self._most]


def parted(text: str, most: int | None) -> tuple[str, list[dict[str, Any]]]:
    """A whole answer's text and calls."""
    caller = ToolCallParser(most)
    before = caller.push(text)
    rest, calls = caller.finish()
    return before + rest, calls


def readable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of earlier calls as templates want them: objects, where clients send JSON as text."""
    return [
        {**message, "tool_calls": [_unpacked(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _unpacked(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _call(said: str) -> dict[str, Any] | None:
    try:
        call = msgspec.json.decode(said.strip(), type=_Said)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = msgspec.json.encode(call.arguments).decode()
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
