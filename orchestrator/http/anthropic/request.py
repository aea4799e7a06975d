"""POST /v1/messages: what may be asked, as the chat that it stands for. Pure.

In Anthropic's API a message is a list of blocks, and a user's message may hold tool results; in a chat each result is
a message.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orchestrator.http.chat_request import SHARED_NAMES, ChatRequest, UncheckedSamplingFields
from orchestrator.http.errors import ApiError, unsupported
from orchestrator.http.request_bodies import converted
from protocol.messages.base import MAX_FUNCTIONS

Block = Mapping[str, Any]
Message = dict[str, Any]
_THOUGHTS = ("thinking", "redacted_thinking")


def messages(system: Any, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a chat. Raises ApiError for a malformed block or one that is not text."""
    found = [{"role": "system", "content": _content(system)}] if system else []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "user":
            found += _user_messages(_blocks(content))
        elif role == "assistant":
            found.append(_assistant_message(_blocks(content)))
        elif role == "system":
            found.append({"role": "system", "content": _content(content)})
        else:
            raise _wrong(f"A message's role is {role!r} and must be user, assistant or system.")
    if found and found[-1]["role"] == "assistant":
        raise unsupported("messages", "The beginning of an answer can't be given: end with a user message.")
    return found


def function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat requests. Raises ApiError for a tool that Anthropic's servers would run."""
    if tool.get("type", "custom") not in ("custom", None):
        raise unsupported("tools", f"This server runs no tools of type {tool['type']!r}: offer tools of your own.")
    names = {"name": "name", "description": "description", "strict": "strict", "input_schema": "parameters"}
    function = {ours: tool[theirs] for theirs, ours in names.items() if tool.get(theirs) is not None}
    return {"type": "function", "function": function}


def _user_messages(blocks: Sequence[Block]) -> list[Message]:
    """Tool results and user texts, in their order."""
    found: list[Message] = []
    for result, group in groupby(blocks, key=lambda block: block.get("type") == "tool_result"):
        if result:
            found += map(_tool_message, group)
        else:
            found.append({"role": "user", "content": "".join(map(_block_text, group))})
    return found


def _tool_message(block: Block) -> Message:
    failed = "Error: " if block.get("is_error") else ""
    content = failed + _content(block.get("content") or "")
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id"), "content": content}


def _assistant_message(blocks: Sequence[Block]) -> Message:
    texts = [_block_text(block) for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thoughts = [_text(block, "thinking") for block in blocks if block.get("type") == "thinking"]
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": _text(block, "name"), "arguments": arguments}
    return {"id": _text(block, "id"), "type": "function", "function": function}


def _content(content: Any) -> str:
    return "".join(map(_block_text, _blocks(content)))


def _blocks(content: Any) -> Sequence[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise _wrong("The content of a message is neither a text nor a list of blocks.")
    return content


def _block_text(block: Block) -> str:
    if block.get("type") != "text":
        raise unsupported(
            "messages", f"A message has a block of type {block.get('type')!r}, which is not supported there: send text."
        )
    return _text(block, "text")


def _text(block: Block, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"A block of type {block.get('type')!r} has no string as its {name}: add it.")
    return value


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="messages")


_CALLED = {
    "response_format": "output_config",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "thinking_budget": "thinking",
}
"""What fields of the chat are called here."""
_SAME = ("model", "stream", *SHARED_NAMES, "seed")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensRequest(UncheckedSamplingFields, kw_only=True):
    """POST /v1/messages/count_tokens, which ignores sampling. The chat request checks fields that it shares."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    model: Any = None

    def chat(self) -> ChatRequest:
        """Raises ApiError, in the words of this API."""
        self._refuse_unsupported()
        fields = {**self._fields(), "messages": messages(self.system, self.messages)}
        try:
            chat = converted(fields, ChatRequest)
            chat.refuse_unsupported()
        except ApiError as error:
            error.param = _CALLED.get(error.param or "", error.param)
            raise
        return chat

    def _fields(self) -> dict[str, Any]:
        choice = self.tool_choice or {}
        return {
            "model": self.model,
            "tools": None if self.tools is None else [function(tool) for tool in self.tools],
            "tool_choice": _choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _format((self.output_config or {}).get("format")),
            "thinking_budget": (self.thinking or {}).get("budget_tokens") if self.demands_thinking else None,
            "enable_thinking": {"enabled": True, "disabled": False}.get(str((self.thinking or {}).get("type"))),
        }

    @property
    def demands_thinking(self) -> bool:
        return (self.thinking or {}).get("type") == "enabled"

    def _refuse_unsupported(self) -> None:
        """Raises ApiError for what can't be done by any model."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: Any = None
    seed: Any = None
    mcp_servers: Any = None
    container: Any = None

    def _fields(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in _SAME}
        return {**super()._fields(), **same, "max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise unsupported(name, f"{name} is not supported: nothing is run here but the model.")


def _choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    kind = choice.get("type")
    return _CHOICES.get(kind, kind) if isinstance(kind, str) else kind


def _format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}
