"""OpenAI's completions and chat completions as clients read them: one object, or a stream of chunks. Pure."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.api.result import Chosen, Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import OutputEvent, Text
from orchestrator.http.openai.logprobs import LogprobTranscript, whole
from orchestrator.http.openai.tool_calls import ToolCallParser, split_calls
from orchestrator.http.renderer import COMMENT, frame
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.base import Level

AnswerKind = Literal["chat", "text"]
_PREFIX = {"chat": "chatcmpl", "text": "cmpl"}
_DONE = b"data: [DONE]\n\n"
_OBJECT = {"chat": "chat.completion", "text": "text_completion"}


@dataclass(frozen=True)
class ChoiceAnswer:
    """The objects and chunks that answer one request."""

    kind: AnswerKind
    model: str
    prompts: int
    """Number of prompts: `usage` counts a prompt once for all its choices."""
    with_usage: bool = False
    """The stream ends with a chunk that holds the usage."""
    tools: bool = False
    """The request offers tools."""
    most_calls: int | None = None
    codec: TextCodec | None = None
    """Decodes the tokens of log-probabilities; None if the request asks for none."""
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
        """The chunk with all tool calls of a choice."""
        return self._chunk(index, {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk(index, {} if self.kind == "chat" else "", reason)

    def last(self, results: Sequence[Result]) -> dict[str, Any]:
        """The chunk that has no choices, only usage."""
        return {**self._head(self._chunk_object), "choices": [], "usage": usage(results, self.prompts)}

    @property
    def _chunk_object(self) -> str:
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
            return {
                "index": index,
                "text": result.text,
                "logprobs": logprobs,
                "finish_reason": result.finish_reason,
            }
        text, calls = split_calls(result.text, self.most_calls) if self.tools else (result.text, [])
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message = {**message, "content": text.strip() or None, "tool_calls": calls}
        reason = finish_reason(result, calls)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, index: int, content: Any, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(self._chunk_object), "choices": [choice]}
        return {**chunk, "usage": None} if self.with_usage else chunk


class Chunks:
    """Renders `answer` for a request with `choices` choices."""

    idle = COMMENT

    def __init__(self, answer: ChoiceAnswer, choices: int) -> None:
        self._answer = answer
        self._parsers = [ToolCallParser(answer.most_calls) if answer.tools else None for _ in range(choices)]
        self._transcripts = [
            LogprobTranscript(answer.kind, answer.codec) if answer.codec else None for _ in range(choices)
        ]

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        return self._answer.whole(results)

    def opening(self) -> Iterable[bytes]:
        return map(frame, self._answer.opening(len(self._parsers)))

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        return map(frame, self._chunks(event, self._parsers[event.index]))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [frame(error.openai_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        return [frame(self._answer.last(results)), _DONE] if self._answer.with_usage else [_DONE]

    def _chunks(self, event: OutputEvent, parser: ToolCallParser | None) -> Iterator[dict[str, Any]]:
        """`parser` holds back text that may be a tool call."""
        answer, transcript = self._answer, self._transcripts[event.index]
        if isinstance(event, Text):
            text = event.text if parser is None else parser.push(event.text)
            logprobs = None if transcript is None else transcript.push(event.text, event.chosen)
            if text or logprobs:
                yield answer.piece(event.index, text, logprobs)
            return
        rest, calls = ("", []) if parser is None else parser.finish()
        if rest:
            yield answer.piece(event.index, rest)
        if calls:
            yield answer.calls(event.index, calls)
        yield answer.end(event.index, finish_reason(event.result, calls))


def finish_reason(result: Result, calls: Sequence[Any]) -> str:
    """OpenAI's finish reason of a choice."""
    return "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason


def usage(results: Sequence[Result], prompts: int) -> dict[str, Any]:
    """Token counts. `results` are in the order of prompts; a prompt counts once for all its choices."""
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


def model_card(name: str, created: int, level: Level | None) -> dict[str, Any]:
    """`level`: what the target verifies in one forward; None until that is known."""
    return {"id": name, "object": "model", "created": created, "owned_by": "launch-pipeline", "level": level}
