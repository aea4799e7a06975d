"""POST /api/chat and /api/generate: what may be asked, as the chat or the completion that it stands for. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orchestrator.http.errors import unsupported
from orchestrator.http.ollama.messages import chat_messages
from orchestrator.http.ollama.names import keep_seconds, own_name
from orchestrator.http.openai.completion_request import CompletionRequest
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.openai.structured_output import response_grammar
from orchestrator.http.request_bodies import converted
from protocol.messages.base import MAX_CONTEXT, MAX_FUNCTIONS
from protocol.messages.grammar import Grammar

_EFFORTS = ("low", "medium", "high")


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options that have an effect. Others are about Ollama's own engine."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def fields(self) -> dict[str, Any]:
        """As OpenAI's requests call them; None is "not given"."""
        same = ("temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "stop")
        return {
            **{name: getattr(self, name) for name in same},
            "repetition_penalty": self.repeat_penalty,
            # Ollama's way to say "random", and "no limit".
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": None if self.num_predict is None or self.num_predict <= 0 else self.num_predict,
        }


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What both routes have in common."""

    model: str | None = None
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Annotated[str, Meta(max_length=32)] | None = None
    keep_alive: Any = None
    logprobs: bool | None = None

    @property
    def streamed(self) -> bool:
        return self.stream is not False

    def refuse_unsupported(self) -> None:
        """Raises ApiError for what would change the answer, if this server could do it."""
        if self.keep_alive is not None:
            keep_seconds(self.keep_alive)
        if isinstance(self.think, str) and self.think not in _EFFORTS:
            raise unsupported("think", f"think is {self.think!r}: give true, false, or one of {', '.join(_EFFORTS)}.")
        if self.logprobs:
            raise unsupported("logprobs", "Log-probabilities are told by /v1/chat/completions: leave logprobs out.")

    def common(self) -> dict[str, Any]:
        """Fields of OpenAI's requests."""
        options = self.options or OllamaOptions()
        return {"model": own_name(self.model), "stream": self.streamed, **options.fields()}

    def thinking(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {"enable_thinking": self.think}

    def response_format(self) -> Mapping[str, Any] | None:
        """Raises ApiError for a format that is neither json nor a schema."""
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format, "strict": True}}
        if self.format == "json":
            return {"type": "json_object"}
        raise unsupported("format", 'format is "json" or a JSON schema.')


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None

    def chat(self) -> ChatRequest:
        """Raises ApiError."""
        self.refuse_unsupported()
        asked = {"messages": chat_messages(self.messages or []), "tools": self.tools or None}
        return _checked({**self.common(), **self.thinking(), **asked, "response_format": self.response_format()})


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: Any = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in ("suffix", "template", "images"):
            if getattr(self, name):
                raise unsupported(name, f"{name} is not supported: leave it out.")
        if self.raw and self.system:
            raise unsupported("system", "A raw prompt is continued as it is: put the system message into it.")

    def chat(self) -> ChatRequest:
        """The prompt as a user's message. Raises ApiError."""
        self.refuse_unsupported()
        turns = [("system", self.system), ("user", self.prompt)]
        messages = [{"role": role, "content": content} for role, content in turns if content]
        asked = {"messages": messages, "response_format": self.response_format()}
        return _checked({**self.common(), **self.thinking(), **asked})

    def completion(self) -> tuple[CompletionRequest, Grammar | None]:
        """The prompt without a template, and what its answer is held to. Raises ApiError."""
        self.refuse_unsupported()
        fields = {**self.common(), "prompt": self.prompt}
        fields["max_tokens"] = fields["max_tokens"] or MAX_CONTEXT
        form = self.response_format()
        return converted(fields, CompletionRequest), None if form is None else response_grammar(form)


def _checked(fields: Mapping[str, Any]) -> ChatRequest:
    chat = converted(fields, ChatRequest)
    chat.refuse_unsupported()
    return chat
