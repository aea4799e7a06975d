"""POST /v1/responses: what may be asked, as the chat that it stands for. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orchestrator.http.errors import ApiError, unsupported
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.request_bodies import converted
from orchestrator.http.responses.items import messages
from orchestrator.http.responses.tools import OfferedTools, joined_name
from orchestrator.http.sampling_fields import SHARED_NAMES, UncheckedSamplingFields
from protocol.messages.base import MAX_FUNCTIONS

Items = list[dict[str, Any]]
_CALLED = {
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
}
"""What fields of the chat are called here."""
_LOGPROBS = "message.output_text.logprobs"
_SAME = ("model", "stream", *SHARED_NAMES, "seed", "parallel_tool_calls", "user")


class Response(UncheckedSamplingFields, kw_only=True):
    """Fields that mean the same in chats are looked at there."""

    input: str | Items = msgspec.field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[Items, Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    model: Any = None
    stream: Any = None
    seed: Any = None
    parallel_tool_calls: Any = None
    user: Any = None
    top_logprobs: Any = None
    include: list[str] | None = None
    truncation: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def items(self) -> Items:
        """The input, always as items."""
        return (
            [{"type": "message", "role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        )

    @property
    def offered(self) -> OfferedTools:
        """Raises ApiError for a malformed tool."""
        return OfferedTools(self.tools or ())

    @property
    def kept(self) -> bool:
        """Whether the answer may be referred to later."""
        return self.store is not False

    def chat(self, before: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """`before`: items of the conversation so far. Raises ApiError, in the words of this API."""
        self._refuse_unsupported()
        heading = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields = {
            **{name: getattr(self, name) for name in _SAME},
            "messages": [*heading, *messages([*before, *self.items])],
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else self.offered.functions,
            "tool_choice": _choice(self.tool_choice),
            "logprobs": self._likelihoods or None,
            "top_logprobs": self.top_logprobs or None,
            "response_format": _format((self.text or {}).get("format")),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        try:
            chat = converted(fields, ChatRequest)
            chat.refuse_unsupported()
        except ApiError as error:
            error.param = _CALLED.get(error.param or "", error.param)
            raise
        return chat

    @property
    def _likelihoods(self) -> bool:
        """Whether log-probabilities are asked for."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def _refuse_unsupported(self) -> None:
        if not self.input and self.previous_response_id is None:
            raise ApiError(400, "There is no input: give a text, or a list of items.", param="input")
        if self._likelihoods and self.offered.functions:
            raise unsupported(
                "top_logprobs", "Log-probabilities are told of texts alone: leave them out, or the tools."
            )
        if self.truncation not in (None, "disabled"):
            raise unsupported("truncation", "Nothing is left out of a conversation that is too long: shorten it.")
        for name, instead in _NOT_DONE.items():
            if getattr(self, name):
                raise unsupported(name, f"{name} is not supported: {instead}.")


_NOT_DONE = {
    "background": "wait for the answer, or stream it",
    "conversation": "continue by previous_response_id",
    "prompt": "send its text as instructions and input",
}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        # Tools that are not run here are not offered either.
        tools = [_choice(tool) for tool in choice["tools"] if isinstance(tool, Mapping) and "name" in tool]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    if not isinstance(choice, Mapping) or "name" not in choice:
        return choice
    kind, name = choice.get("type"), choice["name"]
    if isinstance(name, str):
        name = joined_name(name, choice.get("namespace"))
    return {"type": "function" if kind == "custom" else kind, "function": {"name": name}}


def _format(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
