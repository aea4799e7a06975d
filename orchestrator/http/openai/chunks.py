"""OpenAI's completions and chat completions as clients read them: one object, or chunks of one. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import OutputEvent, Text
from orchestrator.http.openai.answers import ChoiceAnswer, ended
from orchestrator.http.openai.logprobs import LogprobTranscript
from orchestrator.http.openai.tool_calls import ToolCallParser
from orchestrator.http.renderer import COMMENT, frame

_DONE = b"data: [DONE]\n\n"


class Chunks:
    """`answer` to a request for so many choices."""

    idle = COMMENT

    def __init__(self, answer: ChoiceAnswer, choices: int) -> None:
        self._answer = answer
        self._callers = [ToolCallParser(answer.most_calls) if answer.tools else None for _ in range(choices)]
        self._transcripts = [
            LogprobTranscript(answer.kind, answer.codec) if answer.codec else None for _ in range(choices)
        ]

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        return self._answer.whole(results)

    def opening(self) -> Iterable[bytes]:
        return map(frame, self._answer.opening(len(self._callers)))

    def told(self, event: OutputEvent) -> Iterable[bytes]:
        return map(frame, self._chunks(event, self._callers[event.index]))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        # Clients look for this key.
        return [frame(error.openai_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        return [frame(self._answer.last(results)), _DONE] if self._answer.with_usage else [_DONE]

    def _chunks(self, event: OutputEvent, caller: ToolCallParser | None) -> Iterator[dict[str, Any]]:
        """`caller` holds back what may be a call of a tool."""
        answer, transcript = self._answer, self._transcripts[event.index]
        if isinstance(event, Text):
            text = event.text if caller is None else caller.push(event.text)
            logprobs = None if transcript is None else transcript.push(event.text, event.chosen)
            if text or logprobs:
                yield answer.piece(event.index, text, logprobs)
            return
        rest, calls = ("", []) if caller is None else caller.finish()
        if rest:
            yield answer.piece(event.index, rest)
        if calls:
            yield answer.calls(event.index, calls)
        yield answer.end(event.index, ended(event.result, calls))
