"""The response to POST /v1/responses: one object, or the events that build it up. Pure.

The object is made from the events, so that both forms have the same content.
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
    """Renders the response to one request."""

    idle = COMMENT

    def __init__(
        self,
        head: Mapping[str, Any],
        content: AnswerContent,
        transcript: LogprobTranscript | None,
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        """`head`: the fields that are known before generation. `store` gets the finished response."""
        self._head = head
        self._content = content
        self._transcript = transcript
        self._store = store
        self._message: MessageItem | None = None
        self._items: list[MessageItem | ToolCallItem] = []
        self._sent = 0

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        chosen = tuple(map(Chosen, result.tokens, result.likelihoods))
        for event in (Text(0, result.text, chosen), End(0, result)):
            # Each event adds to the items.
            for _ in self._events(event):
                pass
        return self._finished(result)

    def opening(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._object("in_progress")})

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        return map(self._numbered, self._events(event))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if self._message is not None:
            self._message.interrupt()
        response = self._object("failed", error={"code": code, "message": str(error)})
        return [self._numbered({"type": "response.failed", "response": response})]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        response = self._finished(*results)
        return [self._numbered({"type": f"response.{response['status']}", "response": response})]

    def _numbered(self, content: dict[str, Any]) -> bytes:
        self._sent += 1
        return frame({**content, "sequence_number": self._sent - 1}, content["type"])

    def _events(self, event: OutputEvent) -> Iterator[OutputItem]:
        (text, calls), logprobs = self._content.parse(event), self._logprobs(event)
        if text or logprobs:
            if self._message is None:
                self._message = MessageItem(len(self._items))
                self._items.append(self._message)
                yield from self._message.begin()
            yield self._message.add(text, logprobs)
        if isinstance(event, Text):
            return
        if self._message is not None:
            yield from self._message.end(_STATUS[event.result.finish_reason])
        for call in calls:
            item = ToolCallItem(len(self._items), call)
            self._items.append(item)
            yield from item.events()

    def _logprobs(self, event: OutputEvent) -> list[dict[str, Any]]:
        """The log-probabilities to send with an event, if the request asks for them."""
        if self._transcript is None or not isinstance(event, Text):
            return []
        ready = self._transcript.push(event.text, event.chosen)
        return [] if ready is None else ready["content"]

    def _finished(self, result: Result) -> dict[str, Any]:
        status = _STATUS[result.finish_reason]
        incomplete = None if status == "completed" else {"reason": "max_output_tokens"}
        response = self._object(status, incomplete_details=incomplete, usage=_usage(usage([result], 1)))
        self._store(response)
        return response

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        defaults = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **defaults, **more, "status": status, "output": [item.item for item in self._items]}


def _usage(counted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": counted["prompt_tokens_details"],
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }
