"""POST /api/chat and /api/generate: what may be asked, as the chat or the completion that it stands for. Pure.

Ollama's calls have no ids, and a result names its function; in a chat a result names the id of its call.
"""

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, Any

from msgspec import Meta

from orchestrator.http.errors import ApiError, refuse_given, unsupported
from orchestrator.http.model_table import Seconds
from orchestrator.http.openai.history import Note, parts
from orchestrator.http.openai.request import ChatRequest, CompletionRequest, question
from orchestrator.http.openai.translation import TranslatedRequest, unknown, unused
from protocol.messages.base import MAX_CONTEXT, MAX_FUNCTIONS

_LATEST = ":latest"
"""Clients add it to a name without a tag."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_MOST_CHARACTERS = 64


def own_name(name: str | None) -> str | None:
    """A name as this server's models have it."""
    return None if not name else name.removesuffix(_LATEST)


def keep_seconds(keep_alive: Any) -> Seconds | None:
    """How long a model stays loaded without requests: a number of seconds, or a text like 1h30m. Negative is for ever,
    which is None. Raises ApiError 400."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        try:
            seconds = float(keep_alive)
        except OverflowError as error:
            raise _wrong_duration("too large") from error
    elif isinstance(keep_alive, str) and len(keep_alive) <= _MOST_CHARACTERS:
        seconds = _seconds(keep_alive.strip())
    else:
        raise _wrong_duration(keep_alive)
    return None if seconds < 0 else seconds


def _seconds(text: str) -> Seconds:
    sign = -1.0 if text.startswith("-") else 1.0
    size = text.lstrip("+-")
    if re.fullmatch(r"\d+(\.\d+)?", size):
        return sign * float(size)
    parts = _PART.findall(size)
    if not parts or "".join(number + unit for number, unit in parts) != size:
        raise _wrong_duration(text)
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)


def _wrong_duration(value: Any) -> ApiError:
    return ApiError(
        400, f"keep_alive is {value!r}: give seconds, a duration like 5m, or -1 for ever.", param="keep_alive"
    )


Message = dict[str, Any]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a chat. Images are parts of their content."""
    found: list[Message] = []
    open_calls = _OpenCalls()
    for message in messages:
        kept: Message = {"role": message.get("role"), "content": message.get("content") or ""}
        if images := message.get("images"):
            kept["content"] = [kept["content"], *({"type": "image"} for _ in parts(images))]
        if message.get("thinking"):
            kept["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            kept["tool_calls"] = [open_calls.add(call) for call in parts(message["tool_calls"])]
        if kept["role"] == "tool":
            kept |= open_calls.answered(message.get("tool_name") or message.get("name"))
        found.append(kept)
    return found


class _OpenCalls:
    """Calls that have no result yet, in their order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._names: OrderedDict[str, str] = OrderedDict()
        """By id."""
        self._ids: dict[str, deque[str]] = defaultdict(deque)
        """By name."""

    def add(self, call: Any) -> Any:
        """The call with its id, if it has a name. Mistral's templates read only ids of nine letters and digits."""
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            return call
        id = f"call{next(self._numbers):05}"
        self._names[id] = name
        self._ids[name].append(id)
        called = {"name": name, "arguments": function.get("arguments") or {}}
        return {"id": id, "type": "function", "function": called}

    def answered(self, name: Any) -> dict[str, Any]:
        """Name and id of the call that a result for `name` answers: the first one of that name, or for None the first
        one."""
        if name is None:
            name = next(iter(self._names.values()), None)
        ids = self._ids.get(name) if isinstance(name, str) else None
        if not ids:
            return {} if name is None else {"name": name}
        id = ids.popleft()
        del self._names[id]
        return {"name": name, "tool_call_id": id}


_LIMIT = "num_predict"
_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "reasoning_eos",
    "seed",
    "stop",
)
"""The options that a chat has too. Others, save the limit, are about Ollama's own engine."""


class OllamaRequest(TranslatedRequest, kw_only=True):
    """What both routes have in common."""

    model: str | None = None
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Annotated[str, Meta(max_length=32)] | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def refuse_unsupported(self) -> None:
        """Raises ApiError for what would change the answer, if this server could do it."""
        if self.keep_alive is not None:
            keep_seconds(self.keep_alive)

    def asked(self, notes: Sequence[Note]) -> ChatRequest | CompletionRequest | None:
        """The chat or the completion that it stands for; None without a prompt. Raises ApiError."""
        raise NotImplementedError

    def common(self) -> dict[str, Any]:
        """Fields of OpenAI's requests."""
        given = self.options or {}
        options = {name: given.get(name) for name in _OPTIONS}
        limit = {"max_tokens": given.get(_LIMIT)}
        return {"model": own_name(self.model), "stream": self.stream is not False, **options, **limit}

    @property
    def unused(self) -> list[Note]:
        return unused(f"options.{name}" for name in unknown(self.options or {}, (_LIMIT, *_OPTIONS)))

    def of_chat(self) -> dict[str, Any]:
        """Those of a chat."""
        told = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs if self.logprobs else None}
        return {**self.common(), **told, "think": self.think, "response_format": self.response_format()}

    def response_format(self) -> Mapping[str, Any] | None:
        """Raises ApiError for a format that is neither json nor a schema."""
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return {"type": "json_schema", "schema": self.format}
        if self.format == "json":
            return {"type": "json_object"}
        raise unsupported("format", 'format is "json" or a JSON schema.')


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None

    def asked(self, notes: Sequence[Note]) -> ChatRequest | None:
        if not self.messages:
            return None
        self.refuse_unsupported()
        turns = chat_messages(self.messages)
        # The beginning of an answer is the last message here.
        begun = turns[-1]["role"] == "assistant"
        asked = {"messages": turns, "tools": self.tools or None, "continue_final_message": begun or None}
        return question({**self.of_chat(), **asked}, ChatRequest, notes)


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
        refuse_given(self, dict.fromkeys(("suffix", "template", "images"), "leave it out"))
        if self.raw and self.system:
            raise unsupported("system", "A raw prompt is continued as it is: put the system message into it.")

    def asked(self, notes: Sequence[Note]) -> ChatRequest | CompletionRequest | None:
        """The prompt as a user's message, or without a template."""
        if not self.prompt:
            return None
        self.refuse_unsupported()
        if not self.raw:
            turns = [("system", self.system), ("user", self.prompt)]
            messages = [{"role": role, "content": content} for role, content in turns if content]
            return question({**self.of_chat(), "messages": messages}, ChatRequest, notes)
        told = {"logprobs": min(self.top_logprobs or 0, 5) if self.logprobs else None}
        fields = {**self.common(), **told, "prompt": self.prompt, "response_format": self.response_format()}
        fields["max_tokens"] = fields["max_tokens"] or MAX_CONTEXT
        return question(fields, CompletionRequest, notes)
