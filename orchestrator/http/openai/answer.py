"""OpenAI's completions and chat completions as clients read them: one object, or a stream of chunks. Pure."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from msgspec import structs

from orchestrator.api.result import Chosen, Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import (
    COMMENT,
    ChoiceEnd,
    OutputEvent,
    PromptProgress,
    TextPiece,
    WaitingStream,
    frame,
    warned,
)
from orchestrator.http.openai.answer_content import LogprobTranscript, call_id, echoed_logprobs, no_logprobs, usage
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.text.answer.parts import Call, Part, Reasoning, Spoken, ThoughtJoiner, ThoughtSpan
from orchestrator.text.tokenizer import TextCodec


def best(results: Sequence[Result], prompts: int, count: int) -> list[Result]:
    """The `count` answers of each prompt with the highest log-probability per token, best first. `results` are in the
    order of prompts and have likelihoods."""
    each = len(results) // prompts
    groups = [results[start : start + each] for start in range(0, len(results), each)]
    return [result for group in groups for result in sorted(group, key=_log_probability, reverse=True)[:count]]


def _log_probability(result: Result) -> float:
    chosen = [likelihood.chosen for likelihood in result.likelihoods]
    return sum(chosen) / len(chosen) if chosen else 0.0


AnswerKind = Literal["chat", "text"]
_PREFIX = {"chat": "chatcmpl", "text": "cmpl"}
_DONE = b"data: [DONE]\n\n"
_OBJECT = {"chat": "chat.completion", "text": "text_completion"}


class Echo(NamedTuple):
    """A prompt that the client wants back."""

    text: str
    tokens: Sequence[int]


@dataclass(frozen=True)
class ChoiceAnswer:
    """The objects and chunks that answer one request."""

    kind: AnswerKind
    model: str
    with_usage: bool = False
    """The stream ends with a chunk that holds the usage."""
    codec: TextCodec | None = None
    """Decodes the tokens of log-probabilities; None if the request asks for none."""
    prompt: PreparedRequest = PreparedRequest(())
    """How the answers are read."""
    reasoning_tokens: Callable[[str], int] = len
    """Counts the tokens of a text."""
    echoed: Sequence[Echo] = ()
    """Of each choice, the prompt that comes before it."""
    silent: bool = False
    """Nothing comes behind the prompt: the token that was generated is left out."""
    returned: int | None = None
    """Choices of each prompt that are returned, the best ones; None for all."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        results = [_silenced(result) for result in results] if self.silent else results
        shown = results if self.returned is None else best(results, self._prompts, self.returned)
        parsed = [self._parsed(result) for result in shown]
        choices = [self._choice(index, *each) for index, each in enumerate(zip(shown, parsed, strict=True))]
        reasoning = [_joined(parts, Reasoning) for parts, _ in parsed]
        answer = {**self._head(_OBJECT[self.kind]), "choices": choices, "usage": self.usage(results, reasoning)}
        return answer | warned([*self.prompt.warnings, *self.prompt.if_cut(results)])

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        if self.kind == "text":
            return [self.piece(index, echo.text) for index, echo in enumerate(self.echoed)]
        first, *others = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(choices)]
        return [first | warned(self.prompt.warnings), *others]

    def piece(self, index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        return self._chunk(index, {"content": text} if self.kind == "chat" else text, logprobs=logprobs)

    def reasoning(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"reasoning_content": text})

    def call(self, index: int, place: int, call: Call) -> dict[str, Any]:
        """`place`: the call's index among those of the choice."""
        return self._chunk(index, {"tool_calls": [{"index": place, **_chat_call(call)}]})

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk(index, {} if self.kind == "chat" else "", reason)

    def last(self, results: Sequence[Result], reasoning: Sequence[str]) -> dict[str, Any]:
        """The chunk that has no choices, only usage."""
        return {**self._head(self._chunk_object), "choices": [], "usage": self.usage(results, reasoning)}

    def usage(self, results: Sequence[Result], reasoning: Sequence[str]) -> dict[str, Any]:
        """`reasoning`: of each choice."""
        return usage(results, self._prompts, sum(self.reasoning_tokens(text) for text in reasoning if text))

    @property
    def _prompts(self) -> int:
        """`usage` counts a prompt once for all its choices."""
        return max(1, len(self.prompt.tokens))

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

    def _parsed(self, result: Result) -> tuple[list[Part], Sequence[ThoughtSpan]]:
        """The parts of an answer, and its thoughts, as of AnswerParser."""
        parser = self.prompt.new_parser()
        parts = [*parser.push(result.text), *parser.finish()]
        return [*map(ThoughtJoiner().push, parts)], parser.thoughts

    def _choice(self, index: int, result: Result, parsed: tuple[list[Part], Sequence[ThoughtSpan]]) -> dict[str, Any]:
        parts, thoughts = parsed
        text, reasoning = _joined(parts, Spoken), _joined(parts, Reasoning)
        calls = [_chat_call(part) for part in parts if isinstance(part, Call)]
        echo = self.echoed[index] if self.echoed else None
        logprobs = self._logprobs(result, thoughts, echo)
        reason = finish_reason(result, bool(calls))
        if self.kind == "text":
            text = echo.text + text if echo else text
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        message = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message = {**message, "reasoning_content": reasoning}
        if calls:
            message = {**message, "content": text.strip() or None, "tool_calls": calls}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, result: Result, thoughts: Sequence[ThoughtSpan], echo: Echo | None) -> dict[str, Any] | None:
        if self.codec is None:
            return None
        if echo is not None:
            chosen = list(map(Chosen, result.tokens, result.likelihoods))
            return echoed_logprobs(self.codec, echo.tokens, result.prompt_likelihoods, echo.text, chosen)
        transcript = LogprobTranscript(self.kind, self.codec, self.prompt.shown, self.prompt.marked)
        found = transcript.push(result.text, map(Chosen, result.tokens, result.likelihoods), thoughts)
        return found or no_logprobs(self.kind, self.codec)

    def reading(self, event: PromptProgress) -> dict[str, Any]:
        """A chunk without text. `prompt_progress` has the names that llama.cpp's server gives it."""
        chunk = self._chunk(event.index, {} if self.kind == "chat" else "")
        return {**chunk, "prompt_progress": {"processed": event.tokens, "total": event.total}}

    def _chunk(self, index: int, content: Any, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(self._chunk_object), "choices": [choice]}
        return {**chunk, "usage": None} if self.with_usage else chunk


class Chunks:
    """Renders `answer` for a request with `choices` choices."""

    def __init__(self, answer: ChoiceAnswer, choices: int) -> None:
        self._answer = answer
        self._choices = [_ChoiceChunks(answer, index) for index in range(choices)]

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        return self._answer.whole(results)

    def opening(self) -> Iterable[bytes]:
        return map(frame, self._answer.opening(len(self._choices)))

    def idle(self) -> bytes:
        return COMMENT

    def reading(self, event: PromptProgress) -> bytes:
        return frame(self._answer.reading(event))

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        made = [*self._choices[event.index].chunks(event)]
        if isinstance(event, ChoiceEnd):
            made[-1] |= warned(self._answer.prompt.if_cut([event.result]))
        return map(frame, made)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [frame(error.openai_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        reasoning = [choice.reasoning for choice in self._choices]
        return [frame(self._answer.last(results, reasoning)), _DONE] if self._answer.with_usage else [_DONE]


def waiting_chunk(kind: AnswerKind, model: str) -> WaitingStream:
    """A chunk without text."""
    return WaitingStream(frame, ChoiceAnswer(kind, model).piece(0, ""), ApiError.openai_body)


class _ChoiceChunks:
    """The chunks of one choice."""

    def __init__(self, answer: ChoiceAnswer, index: int) -> None:
        self._answer = answer
        self._index = index
        self._parser = answer.prompt.new_parser()
        codec, prompt = answer.codec, answer.prompt
        self._transcript = None if codec is None else LogprobTranscript(answer.kind, codec, prompt.shown, prompt.marked)
        self._joiner = ThoughtJoiner()
        self._calls = 0
        self.reasoning = ""

    def chunks(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        """The parser holds back text that may be a marker."""
        if isinstance(event, TextPiece):
            parts = self._parser.push(event.text)
            yield from self._of_parts(parts, self._logprobs(event))
        else:
            yield from self._of_parts(self._parser.finish(), None)
            yield self._answer.end(self._index, finish_reason(event.result, bool(self._calls)))

    def _of_parts(self, parts: Sequence[Part], logprobs: Any) -> Iterator[dict[str, Any]]:
        """`logprobs` go with the first text."""
        for part in map(self._joiner.push, parts):
            match part:
                case Reasoning(text):
                    self.reasoning += text
                    yield self._answer.reasoning(self._index, text)
                case Spoken(text):
                    yield self._answer.piece(self._index, text, logprobs)
                    logprobs = None
                case Call():
                    self._calls += 1
                    yield self._answer.call(self._index, self._calls - 1, part)
        if logprobs:
            yield self._answer.piece(self._index, "", logprobs)

    def _logprobs(self, event: TextPiece) -> Any:
        if self._transcript is None:
            return None
        return self._transcript.push(event.text, event.chosen, self._parser.thoughts)


def _chat_call(call: Call) -> dict[str, Any]:
    return {"id": call_id(call), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _joined(parts: Iterable[Part], kind: type[Reasoning] | type[Spoken]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _silenced(result: Result) -> Result:
    statistics = structs.replace(result.statistics, generated_tokens=0)
    return replace(result, text="", tokens=(), likelihoods=(), finish_reason="length", statistics=statistics)


def finish_reason(result: Result, called: bool) -> str:
    """OpenAI's finish reason of a choice. `called`: whether it has tool calls."""
    return "tool_calls" if called and result.finish_reason == "stop" else result.finish_reason
