"""Tool calls in a model's output, in the format that Hermes and Qwen models are trained on. Pure.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A model may write a malformed one, which stays
text.
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


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def supports_tools(template: ChatTemplate) -> bool:
    """Whether the model's template renders tools and asks for calls in this format."""
    try:
        text = template.text([{"role": "user", "content": ""}], [_PROBE]) if template.knows_tools else ""
    except InputError:
        return False
    return _OPEN in text and '"arguments"' in text


class ToolCallParser:
    """Splits one answer, piece by piece, into text and the calls after it."""

    def __init__(self, most: int | None) -> None:
        """`most`: number of calls that the client accepts; None for any number."""
        self._most = most
        self._scanner = StopScanner([_OPEN])
        self._calls: str | None = None
        """The output from the first call on; None before a call."""

    def push(self, text: str) -> str:
        """The part of the output so far that is certainly text, without what was returned before."""
        if self._calls is not None:
            self._calls += text
            return ""
        held = self._scanner.held + text
        before, found = self._scanner.push(text)
        if found:
            self._calls = held[len(before) :]
        return before

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls. If one call is malformed, all of them are text."""
        if self._calls is None:
            return self._scanner.flush(), []
        calls = [_parsed(content) for content in _CALL.findall(self._calls)]
        if any(call is None for call in calls):
            return self._calls, []
        return "", [call for call in calls if call is not None][: self._most]


def split_calls(text: str, most: int | None) -> tuple[str, list[dict[str, Any]]]:
    """Text and calls of a finished answer."""
    parser = ToolCallParser(most)
    before = parser.push(text)
    rest, calls = parser.finish()
    return before + rest, calls


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of earlier calls as objects, as templates need them; clients send JSON text."""
    return [
        {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(content: str) -> dict[str, Any] | None:
    try:
        call = msgspec.json.decode(content.strip(), type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = msgspec.json.encode(call.arguments).decode()
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
