"""POST /v1/messages: what may be asked, as the chat that it stands for. Pure.

In Anthropic's API a message is a list of blocks, and a user's message may hold tool results; in a chat each result is
a message.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

from msgspec import Meta

from orchestrator.http.errors import refuse_given
from orchestrator.http.openai.chat_request import SHARED_NAMES, ChatRequest, UncheckedSamplingFields, question
from orchestrator.http.openai.history import THOUGHTS, Note, parts
from protocol.messages.base import MAX_FUNCTIONS

Block = Mapping[str, Any]
Message = dict[str, Any]


def messages(system: Any, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a chat, with the blocks of this API as contents."""
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "user":
            found += _user_messages(parts(content))
        elif role == "assistant":
            found.append(_assistant_message(parts(content)))
        else:
            found.append({"role": role, "content": content})
    return found


def _user_messages(blocks: Sequence[Any]) -> list[Message]:
    """Tool results and user texts, in their order."""
    found: list[Message] = []
    for result, group in groupby(blocks, key=lambda block: _kind(block) == "tool_result"):
        if result:
            found += map(_tool_message, group)
        else:
            found.append({"role": "user", "content": list(group)})
    return found or [{"role": "user", "content": ""}]


def _tool_message(block: Block) -> Message:
    failed = ["Error: "] if block.get("is_error") else []
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id"),
        "content": [*failed, *parts(block.get("content"))],
    }


def _assistant_message(blocks: Sequence[Any]) -> Message:
    spoken = [block for block in blocks if _kind(block) not in ("tool_use", *THOUGHTS)]
    calls = [_call(block) for block in blocks if _kind(block) == "tool_use"]
    thoughts = [block.get("thinking") for block in blocks if _kind(block) == "thinking"]
    message: Message = {"role": "assistant", "content": spoken}
    if thought := "".join(text for text in thoughts if isinstance(text, str)):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _kind(block: Any) -> object:
    return block.get("type") if isinstance(block, Mapping) else None


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


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
        return question(fields, ChatRequest, notes, called=_CALLED)

    def _fields(self) -> dict[str, Any]:
        choice = self.tool_choice or {}
        return {
            "model": self.model,
            "tools": self.tools,
            "tool_choice": choice or None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": (self.output_config or {}).get("format"),
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
        refuse_given(self, dict.fromkeys(("mcp_servers", "container"), "nothing is run here but the model"))
