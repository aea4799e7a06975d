"""The answer to POST /v1/responses: one object, or the events that build it up. Pure.

The object is what the events add up to, so that both ways tell the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.api.result import Chosen, Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import End, OutputEvent, Text
from orchestrator.http.openai.answers import usage
from orchestrator.http.openai.content import AnswerContent
from orchestrator.http.openai.logprobs import LogprobTranscript
from orchestrator.http.renderer import COMMENT, frame
from orchestrator.http.responses.output_items import MessageItem, OutputItem, ToolCallItem

_STATUS = {"stop": "completed", "length": "incomplete"}


class ResponseAnswer:
    """To one request."""

    idle = COMMENT

    def __init__(
        self,
        head: Mapping[str, Any],
        parts: AnswerContent,
        transcript: LogprobTranscript | None,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        """`head`: what is known before anything is generated. `keep` gets the finished answer."""
        self._head = head
        self._parts = parts
        self._transcript = transcript
        self._keep = keep
        self._message: MessageItem | None = None
        self._items: list[MessageItem | ToolCallItem] = []
        self._sent = 0

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        chosen = tuple(map(Chosen, result.tokens, result.likelihoods))
        for event in (Text(0, result.text, chosen), End(0, result)):
            # The items build up as their events are told.
            for _ in self._events(event):
                pass
        return self._finished(result)

    def opening(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._object("in_progress")})

    def told(self, event: OutputEvent) -> Iterable[bytes]:
        return map(self._numbered, self._events(event))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if self._message is not None:
            self._message.cut()
        response = self._object("failed", error={"code": code, "message": str(error)})
        return [self._numbered({"type": "response.failed", "response": response})]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        response = self._finished(*results)
        return [self._numbered({"type": f"response.{response['status']}", "response": response})]

    def _numbered(self, content: dict[str, Any]) -> bytes:
        self._sent += 1
        return frame({**content, "sequence_number": self._sent - 1}, content["type"])

    def _events(self, event: OutputEvent) -> Iterator[OutputItem]:
        (text, calls), likely = self._parts.told(event), self._likely(event)
        if text or likely:
            if self._message is None:
                self._message = MessageItem(len(self._items))
                self._items.append(self._message)
                yield from self._message.begin()
            yield self._message.add(text, likely)
        if isinstance(event, Text):
            return
        if self._message is not None:
            yield from self._message.end(_STATUS[event.result.finish_reason])
        for call in calls:
            item = ToolCallItem(len(self._items), call)
            self._items.append(item)
            yield from item.told()

    def _likely(self, event: OutputEvent) -> list[dict[str, Any]]:
        """Log-probabilities that go out with an event, if they were asked for."""
        if self._transcript is None or not isinstance(event, Text):
            return []
        told = self._transcript.push(event.text, event.chosen)
        return [] if told is None else told["content"]

    def _finished(self, result: Result) -> dict[str, Any]:
        status = _STATUS[result.finish_reason]
        cut = None if status == "completed" else {"reason": "max_output_tokens"}
        counted = _usage(usage([result], 1))
        response = self._object(status, incomplete_details=cut, usage=counted)
        self._keep(response)
        return response

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        known = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **known, **more, "status": status, "output": [item.item for item in self._items]}


def _usage(counted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": counted["prompt_tokens_details"],
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }
