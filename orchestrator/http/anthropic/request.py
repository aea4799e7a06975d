"""POST /v1/messages: what may be asked, as the chat that it stands for. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from orchestrator.http.anthropic.content_blocks import function, messages
from orchestrator.http.errors import ApiError, unsupported
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.request_bodies import converted
from orchestrator.http.sampling_fields import SHARED_NAMES, UncheckedSamplingFields
from protocol.messages.base import MAX_FUNCTIONS

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
