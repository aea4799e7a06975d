"""The answers of /api/chat and /api/generate: one object, or lines that build it up. Pure but for the time of day."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import OutputEvent, PromptProgress, WaitingStream, sources, warned
from orchestrator.http.model_table import Seconds
from orchestrator.http.openai.answer_content import AnswerContent, arguments_object
from orchestrator.text.answer.parts import Arguments, Call, Reasoning, Spoken, ThoughtJoiner

MEDIA_TYPE = "application/x-ndjson"
_NANOSECONDS = 1_000_000_000


def line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def empty_line(model: str, *, chat: bool, **more: Any) -> dict[str, Any]:
    """An object without text, which clients add to the others."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": now, **text, "done": False, **more}


class OllamaAnswer:
    """Renders the response to one request."""

    def __init__(self, model: str, content: AnswerContent, *, chat: bool, loading: Seconds = 0.0) -> None:
        """`loading`: how long the request waited for its model."""
        self._model = model
        self._content = content
        self._joiner = ThoughtJoiner()
        self._call = Call("", "")
        """The one at hand, which clients take only whole."""
        self._arguments: list[str] = []
        self._chat = chat
        self._loading = loading

    def idle(self, event: PromptProgress | None = None) -> bytes:
        return line(empty_line(self._model, chat=self._chat, **(event.field if event else {})))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        text, end = self._content.events(result)
        parts = [*self._parse(text), *self._parse(end)]
        texts = {kind: "".join(part.text for part in parts if isinstance(part, kind)) for kind in (Spoken, Reasoning)}
        calls = [_call(part) for part in parts if isinstance(part, Call)]
        logprobs = self._content.logprobs(text)
        told = {} if logprobs is None else {"logprobs": logprobs}
        return {**self._piece(texts[Spoken], texts[Reasoning], calls), **told, **self._end(result)}

    def opening(self) -> Iterator[bytes]:
        if warnings := self._content.prompt.warnings:
            yield line(empty_line(self._model, chat=self._chat, warnings=warnings))

    def render(self, event: OutputEvent) -> Iterator[bytes]:
        pieces = [self._of_part(part) for part in self._parse(event)]
        if logprobs := self._content.logprobs(event):
            pieces = pieces or [self._piece("")]
            pieces[0]["logprobs"] = logprobs
        yield from map(line, pieces)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [line(error.ollama_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        (result,) = results
        return [line({**self._piece(""), **self._end(result)})]

    def _parse(self, event: OutputEvent) -> Iterator[Reasoning | Spoken | Call]:
        for part in map(self._joiner.push, self._content.parse(event)):
            match part:
                case Call():
                    self._call, self._arguments = part, [part.arguments]
                case Arguments(text, last=last):
                    self._arguments.append(text)
                    if last:
                        yield replace(self._call, arguments="".join(self._arguments))
                case _:
                    yield part

    def _of_part(self, part: Reasoning | Spoken | Call) -> dict[str, Any]:
        match part:
            case Reasoning(text):
                return self._piece("", text)
            case Spoken(text):
                return self._piece(text)
            case Call():
                return self._piece("", calls=[_call(part)])

    def _piece(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        found = empty_line(self._model, chat=self._chat)
        place, name = (found["message"], "content") if self._chat else (found, "response")
        place[name] = text
        if thinking:
            place["thinking"] = thinking
        if calls:
            place["tool_calls"] = calls
        return found

    def _end(self, result: Result) -> dict[str, Any]:
        figures, prompt = result.statistics, self._content.prompt
        rate = figures.tokens_per_second
        return {
            "done": True,
            "done_reason": result.finish_reason,
            "total_duration": _nanoseconds(self._loading + figures.elapsed),
            "load_duration": _nanoseconds(self._loading),
            "prompt_eval_count": figures.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(figures.prefill_seconds),
            "eval_count": figures.generated_tokens,
            "eval_duration": _nanoseconds(figures.generated_tokens / rate if rate else 0.0),
            **sources([result]),
            **warned([*prompt.warnings, *prompt.if_cut([result])]),
        }


def waiting_line(model: str, *, chat: bool) -> WaitingStream:
    """A line without text."""
    return WaitingStream(line, empty_line(model, chat=chat), ApiError.ollama_body, MEDIA_TYPE)


def _call(part: Call) -> dict[str, Any]:
    return {"function": {"name": part.name, "arguments": arguments_object(part.arguments)}}


def _nanoseconds(seconds: Seconds) -> int:
    return round(seconds * _NANOSECONDS)
