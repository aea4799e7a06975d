"""What clients read: OpenAI's response objects, whole and in chunks. Pure."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.api.result import Chosen, Result
from orchestrator.http.openai.logprobs import whole
from orchestrator.http.openai.tool_calls import parted
from orchestrator.text.tokenizer import TextCodec

AnswerKind = Literal["chat", "text"]
_PREFIX = {"chat": "chatcmpl", "text": "cmpl"}
_OBJECT = {"chat": "chat.completion", "text": "text_completion"}


@dataclass(frozen=True)
class ChoiceAnswer:
    """To one request, as completion or chat completion."""

    kind: AnswerKind
    model: str
    prompts: int
    """How many there were: choices of one prompt count it once."""
    with_usage: bool = False
    """The client wants a last chunk with it."""
    tools: bool = False
    """The model was told of some."""
    most_calls: int | None = None
    codec: TextCodec | None = None
    """Spells tokens, where their log-probabilities were asked for."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {**self._head(_OBJECT[self.kind]), "choices": choices, "usage": usage(results, self.prompts)}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        if self.kind == "text":
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(choices)]

    def piece(self, index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        return self._chunk(index, {"content": text} if self.kind == "chat" else text, logprobs=logprobs)

    def calls(self, index: int, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All calls of tools of a choice, each whole."""
        return self._chunk(index, {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk(index, {} if self.kind == "chat" else "", reason)

    def last(self, results: Sequence[Result]) -> dict[str, Any]:
        """The chunk that has no choices, only usage."""
        return {**self._head(self._streamed), "choices": [], "usage": usage(results, self.prompts)}

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{_PREFIX[self.kind]}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        logprobs = None
        if self.codec is not None:
            chosen = map(Chosen, result.tokens, result.likelihoods)
            logprobs = whole(self.kind, self.codec, result.text, chosen)
        if self.kind == "text":
            said: dict[str, Any] = {"text": result.text}
            return {"index": index, **said, "logprobs": logprobs, "finish_reason": result.finish_reason}
        text, calls = parted(result.text, self.most_calls) if self.tools else (result.text, [])
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message = {**message, "content": text.strip() or None, "tool_calls": calls}
        reason = ended(result, calls)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, index: int, said: Any, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        place = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, place: said, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(self._streamed), "choices": [choice]}
        return {**chunk, "usage": None} if self.with_usage else chunk


def ended(result: Result, calls: Sequence[Any]) -> str:
    """Why a choice ended, in OpenAI's words."""
    return "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason


def usage(results: Sequence[Result], prompts: int) -> dict[str, Any]:
    """`results` in the order of prompts; choices of one prompt count its tokens once."""
    each = len(results) // prompts
    prompt = sum(result.statistics.prompt_tokens for result in results[::each])
    completion = sum(result.statistics.generated_tokens for result in results)
    cached = sum(min(result.statistics.adopted_tokens, result.statistics.prompt_tokens) for result in results[::each])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "launch-pipeline"}
