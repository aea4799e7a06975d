"""POST /v1/messages: what may be asked, as the chat that it stands for. Pure.

In Anthropic's API a message is a list of blocks, and a user's message may hold tool results; in a chat each result is
a message.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orchestrator.http.errors import ApiError, unsupported
from orchestrator.http.openai.chat_request import SHARED_NAMES, ChatRequest, UncheckedSamplingFields, question
from orchestrator.http.openai.history import Note
from protocol.messages.base import MAX_FUNCTIONS

Block = Mapping[str, Any]
Message = dict[str, Any]
_THOUGHTS = ("thinking", "redacted_thinking")


def messages(system: Any, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a chat, whose contents are texts, or blocks if not all of these are text."""
    found = [{"role": "system", "content": _content(system)}] if system else []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "user":
            found += _user_messages(_blocks(content))
        elif role == "assistant":
            found.append(_assistant_message(_blocks(content)))
        else:
            found.append({"role": role, "content": _content(content)})
    return found


def _user_messages(blocks: Sequence[Block]) -> list[Message]:
    """Tool results and user texts, in their order."""
    found: list[Message] = []
    for result, group in groupby(blocks, key=lambda block: block.get("type") == "tool_result"):
        if result:
            found += map(_tool_message, group)
        else:
            found.append({"role": "user", "content": _joined(list(group))})
    return found or [{"role": "user", "content": ""}]


def _tool_message(block: Block) -> Message:
    content = _blocks(block.get("content"))
    failed = [{"type": "text", "text": "Error: "}] if block.get("is_error") else []
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _joined([*failed, *content])}


def _assistant_message(blocks: Sequence[Block]) -> Message:
    spoken = [block for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thoughts = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    message: Message = {"role": "assistant", "content": _joined(spoken)}
    if thought := "".join(text for text in thoughts if isinstance(text, str)):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Block) -> dict[str, Any]:
    given = block.get("input") or {}
    arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _content(content: Any) -> str | list[Block]:
    return _joined(_blocks(content))


def _blocks(content: Any) -> list[Block]:
    """A text is a block; what is no block is its JSON."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return [part if isinstance(part, Mapping) else _text_block(part) for part in parts]


def _text_block(part: Any) -> Block:
    return {"type": "text", "text": part if isinstance(part, str) else msgspec.json.encode(part).decode()}


def _joined(blocks: list[Block]) -> str | list[Block]:
    """Their text; the blocks themselves if one has none."""
    texts = [block.get("text") if block.get("type") == "text" else None for block in blocks]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(blocks) else blocks


_CALLED = {
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}
"""What fields of the chat are called here."""
_SAME = ("model", "stream", *SHARED_NAMES, "seed")


class CountTokensRequest(UncheckedSamplingFields, kw_only=True):
    """POST /v1/messages/count_tokens, which ignores sampling. The chat request checks fields that it shares."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    model: Any = None

    def chat(self, notes: Sequence[Note] = ()) -> ChatRequest:
        """Raises ApiError, in the words of this API."""
        self._refuse_unsupported()
        turns = messages(self.system, self.messages)
        fields = {**self._fields(), "messages": turns}
        # The beginning of an answer is the last message here.
        fields["continue_final_message"] = turns[-1]["role"] == "assistant" or None
        try:
            return question(fields, ChatRequest, notes)
        except ApiError as error:
            raise error.in_words_of(_CALLED) from error

    def _fields(self) -> dict[str, Any]:
        choice = self.tool_choice or {}
        return {
            "model": self.model,
            "tools": self.tools,
            "tool_choice": choice or None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _format((self.output_config or {}).get("format")),
            "thinking": self.thinking,
        }

    def _refuse_unsupported(self) -> None:
        """Raises ApiError for what can't be done by any model."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Any = None
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


def _format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}
