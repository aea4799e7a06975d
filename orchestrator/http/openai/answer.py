"""OpenAI's completions and chat completions as clients read them: one object, or a stream of chunks. Pure."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    sources,
    warned,
)
from orchestrator.http.openai.answer_content import LogprobTranscript, call_id, echoed_logprobs, no_logprobs, usage
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.text.answer.parts import Arguments, Call, Part, Reasoning, Spoken, ThoughtJoiner
from orchestrator.text.tokenizer import TextCodec

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
    """Renders the answers of one request. A whole choice is made from its chunks."""

    kind: AnswerKind
    model: str
    choices: int = 1
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
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        results = [_silenced(result) for result in results] if self.silent else results
        choices = [choice.whole(result) for choice, result in zip(self._read, results, strict=False)]
        answer = {**self._head(_OBJECT[self.kind]), "choices": choices, **self._usage(results)}
        return answer | warned([*self.prompt.warnings, *self.prompt.if_cut(results)])

    def opening(self) -> Iterable[bytes]:
        told = warned(self.prompt.warnings)
        texts = [echo.text for echo in self.echoed] or [""] * bool(told)
        contents = [{"role": "assistant", "content": ""}] * self.choices if self.kind == "chat" else texts
        return [frame(self.chunk(place, each) | ({} if place else told)) for place, each in enumerate(contents)]

    def idle(self, event: PromptProgress | None = None) -> bytes:
        if event is None:
            return COMMENT
        return frame(self.chunk(event.index, {} if self.kind == "chat" else "") | event.field)

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        made = [*self._read[event.index].chunks(event)]
        if isinstance(event, ChoiceEnd):
            made[-1] |= warned(self.prompt.if_cut([event.result]))
        return map(frame, made)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [frame(error.openai_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        last = {**self._head(self._chunk_object), "choices": [], **self._usage(results)}
        return [frame(last), _DONE] if self.with_usage else [_DONE]

    def piece(self, index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        return self.chunk(index, {"content": text} if self.kind == "chat" else text, logprobs=logprobs)

    def chunk(self, index: int, content: Any, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head(self._chunk_object), "choices": [choice]}
        return {**chunk, "usage": None} if self.with_usage else chunk

    @cached_property
    def _read(self) -> list["_Choice"]:
        return [_Choice(self, index) for index in range(self.choices)]

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        thoughts = sum(self.reasoning_tokens(each.reasoning) for each in self._read if each.reasoning)
        return {"usage": usage(results, self._prompts, thoughts), **sources(results)}

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


def waiting_chunk(kind: AnswerKind, model: str) -> WaitingStream:
    """A chunk without text."""
    return WaitingStream(frame, ChoiceAnswer(kind, model).piece(0, ""), ApiError.openai_body)


class _Choice:
    """One choice, which its events build up."""

    def __init__(self, answer: ChoiceAnswer, index: int) -> None:
        self._answer = answer
        self._index = index
        self._parser = answer.prompt.new_parser()
        codec, prompt = answer.codec, answer.prompt
        self._transcript = None if codec is None else LogprobTranscript(answer.kind, codec, prompt.shown, prompt.marked)
        self._joiner = ThoughtJoiner()
        self._calls: list[tuple[Call, list[str]]] = []
        """With the pieces of their arguments."""
        self._texts: list[str] = []
        self.reasoning = ""

    def chunks(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        """The parser holds back text that may be a marker."""
        if isinstance(event, TextPiece):
            parts = self._parser.push(event.text)
            yield from self._of_parts(parts, self._logprobs(event.text, event.chosen))
        else:
            yield from self._of_parts(self._parser.finish(), None)
            reason = finish_reason(event.result, bool(self._calls))
            yield self._answer.chunk(self._index, {} if self._answer.kind == "chat" else "", reason)

    def whole(self, result: Result) -> dict[str, Any]:
        for event in (TextPiece(self._index, result.text), ChoiceEnd(self._index, result)):
            # Each chunk adds to the texts and calls.
            for _ in self.chunks(event):
                pass
        text, reason = "".join(self._texts), finish_reason(result, bool(self._calls))
        echo = self._answer.echoed[self._index] if self._answer.echoed else None
        end = {"logprobs": self._whole_logprobs(result, echo), "finish_reason": reason}
        if self._answer.kind == "text":
            return {"index": self._index, "text": echo.text + text if echo else text, **end}
        message = {"role": "assistant", "content": text, "refusal": None}
        if self.reasoning:
            message = {**message, "reasoning_content": self.reasoning}
        if self._calls:
            calls = [_chat_call(call, "".join(pieces)) for call, pieces in self._calls]
            message = {**message, "content": text.strip() or None, "tool_calls": calls}
        return {"index": self._index, "message": message, **end}

    def _of_parts(self, parts: Sequence[Part], logprobs: Any) -> Iterator[dict[str, Any]]:
        """`logprobs` go with the first text."""
        for part in map(self._joiner.push, parts):
            match part:
                case Reasoning(text):
                    self.reasoning += text
                    yield self._answer.chunk(self._index, {"reasoning_content": text})
                case Spoken(text):
                    self._texts.append(text)
                    yield self._answer.piece(self._index, text, logprobs)
                    logprobs = None
                case Call(arguments=text):
                    self._calls.append((part, [text]))
                    yield self._of_call(_chat_call(part, text))
                case Arguments(text):
                    self._calls[-1][1].append(text)
                    if text:
                        yield self._of_call({"function": {"arguments": text}})
        if logprobs:
            yield self._answer.piece(self._index, "", logprobs)

    def _of_call(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._answer.chunk(self._index, {"tool_calls": [{"index": len(self._calls) - 1, **delta}]})

    def _logprobs(self, text: str, chosen: Iterable[Chosen]) -> Any:
        return None if self._transcript is None else self._transcript.push(text, chosen, self._parser.thoughts)

    def _whole_logprobs(self, result: Result, echo: Echo | None) -> dict[str, Any] | None:
        codec = self._answer.codec
        if codec is None:
            return None
        chosen = list(map(Chosen, result.tokens, result.token_logprobs))
        if echo is not None:
            return echoed_logprobs(codec, echo.tokens, result.prompt_token_logprobs, echo.text, chosen)
        return self._logprobs("", chosen) or no_logprobs(self._answer.kind, codec)


def _chat_call(call: Call, arguments: str) -> dict[str, Any]:
    return {"id": call_id(call), "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _silenced(result: Result) -> Result:
    statistics = structs.replace(result.statistics, generated_tokens=0)
    return replace(result, text="", tokens=(), token_logprobs=(), finish_reason="length", statistics=statistics)


def finish_reason(result: Result, called: bool) -> str:
    """OpenAI's finish reason of a choice. `called`: whether it has tool calls."""
    return "tool_calls" if called and result.finish_reason == "stop" else result.finish_reason
