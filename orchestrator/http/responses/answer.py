"""The response to POST /v1/responses: one object, or the events that build it up. Pure.

The object is made from the events, so that both forms have the same content.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import ChoiceEnd, OutputEvent, PromptProgress, WaitingStream, frame, sources, warned
from orchestrator.http.openai.answer_content import AnswerContent, arguments_object, usage
from orchestrator.text.answer.parts import Arguments, Call, Part, Reasoning, Spoken

OutputItem = dict[str, Any]
"""An event without its sequence number."""


class TextItem:
    """The text of a response, or the reasoning before it: one item with one content part."""

    def __init__(self, place: int, *, reasoning: bool) -> None:
        """`place`: index among the items of the response."""
        self.reasoning = reasoning
        self._place = place
        self._id = f"{'rs' if reasoning else 'msg'}_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self.status = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def item(self) -> dict[str, Any]:
        kind = {"type": "reasoning", "summary": []} if self.reasoning else {"type": "message", "role": "assistant"}
        content = [] if self.status == "in_progress" else [self._part(self.text, self._logprobs)]
        return {"id": self._id, **kind, "status": self.status, "content": content}

    def begin(self) -> Iterator[OutputItem]:
        yield item_event("added", self._place, self.item)
        yield self._of_part("content_part.added", part=self._part("", []))

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> OutputItem:
        """`logprobs`: of the tokens that begin in `text`, if the request asks for them."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._of_text("delta", delta=text, logprobs=[*logprobs])

    def end(self, status: str) -> Iterator[OutputItem]:
        self.status = status
        yield self._of_text("done", text=self.text, logprobs=[*self._logprobs])
        yield self._of_part("content_part.done", part=self._part(self.text, self._logprobs))
        yield item_event("done", self._place, self.item)

    def _part(self, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}

    def _of_text(self, what: str, *, logprobs: Sequence[dict[str, Any]], **more: Any) -> OutputItem:
        if self.reasoning:
            return self._of_part(f"reasoning_text.{what}", **more)
        return self._of_part(f"output_text.{what}", logprobs=logprobs, **more)

    def _of_part(self, what: str, **more: Any) -> OutputItem:
        place = {"item_id": self._id, "output_index": self._place, "content_index": 0}
        return {"type": f"response.{what}", **place, **more}


INPUT = "input"
"""The only parameter of a custom tool's function."""
_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_LETTERS = re.compile(
    r"""(?:[^"\\]|\\["\\/bfnrt]|\\u(?:(?![dD][89abAB])[0-9a-fA-F]{4}|[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4}))*"""
)
"""In a JSON text. A pair of surrogates is one."""


def custom_input(arguments: str) -> str:
    """The input of a custom tool; the arguments themselves if the model gave the function others."""
    text = arguments_object(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


class CustomInput:
    """The input of a custom tool, while the arguments of its function arrive."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        self._held += text
        if not self._begun and (head := _HEAD.match(self._held)):
            self._begun, self._held = True, self._held[head.end() :]
        found = _LETTERS.match(self._held) if self._begun else None
        if found is None:
            return ""
        self._held = self._held[found.end() :]
        return json.loads(f'"{found[0]}"', strict=False)


class CallItem:
    """One call of a function or of a custom tool."""

    def __init__(
        self, place: int, call_id: str, name: str, namespace: str | None = None, *, custom: bool = False
    ) -> None:
        self._place = place
        self._custom = CustomInput() if custom else None
        self._field = "input" if custom else "arguments"
        self._events = "custom_tool_call_input" if custom else "function_call_arguments"
        self.status = "in_progress"
        self._arguments: list[str] = []
        self._sent: list[str] = []
        self._item: dict[str, Any] = {
            "id": f"{'ctc' if custom else 'fc'}_{uuid.uuid4().hex}",
            "type": "custom_tool_call" if custom else "function_call",
            "call_id": call_id,
            "name": name,
            **({} if namespace is None else {"namespace": namespace}),
        }

    @property
    def item(self) -> dict[str, Any]:
        return {**self._item, "status": self.status, self._field: "".join(self._sent)}

    def begin(self) -> Iterator[OutputItem]:
        yield item_event("added", self._place, self.item)

    def add(self, text: str) -> Iterator[OutputItem]:
        """`text`: of the arguments."""
        self._arguments.append(text)
        if piece := text if self._custom is None else self._custom.push(text):
            yield self._delta(piece)

    def end(self, status: str) -> Iterator[OutputItem]:
        if not any(self._sent):
            yield self._delta("" if self._custom is None else custom_input("".join(self._arguments)))
        self.status = status
        named = {self._field: self.item[self._field], **({} if self._custom else {"name": self._item["name"]})}
        yield self._of_content("done", **named)
        yield item_event("done", self._place, self.item)

    def _delta(self, text: str) -> OutputItem:
        self._sent.append(text)
        return self._of_content("delta", delta=text)

    def _of_content(self, what: str, **more: Any) -> OutputItem:
        place = {"item_id": self._item["id"], "output_index": self._place}
        return {"type": f"response.{self._events}.{what}", **place, **more}


def item_event(what: str, place: int, item: Mapping[str, Any]) -> OutputItem:
    return {"type": f"response.output_item.{what}", "output_index": place, "item": item}


class MadeItem(Protocol):
    @property
    def item(self) -> OutputItem: ...


class _Numbered:
    _sent = 0
    """Events of the response so far."""

    def _numbered(self, content: dict[str, Any]) -> bytes:
        self._sent += 1
        return frame({**content, "sequence_number": self._sent - 1}, content["type"])


class ResponseAnswer(_Numbered):
    """Renders the response to one request."""

    def __init__(
        self,
        head: Mapping[str, Any],
        content: AnswerContent,
        store: Callable[[dict[str, Any]], None],
        count: Callable[[str], int],
        call_item: Callable[[int, Call], CallItem],
        sent: int = 0,
    ) -> None:
        """`head`: the fields that are known before generation. `store` gets the finished response. `count`: number of
        tokens of a text. `call_item`: makes the item of a call from its index and the call. `sent`:
        events of this response that the client has already, `response.created` among them."""
        self._head = {**head, **warned(content.prompt.warnings)}
        self._content = content
        self._store = store
        self._count = count
        self._call_item = call_item
        self._open: TextItem | CallItem | None = None
        """The last item, while text or arguments may be added to it."""
        self._items: list[MadeItem] = []
        self._sent = sent

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        for event in self._content.events(result):
            # Each event adds to the items.
            for _ in self._events(event):
                pass
        return self._finished(result)

    def opening(self) -> Iterator[bytes]:
        kinds = ("response.in_progress",) if self._sent else ("response.created", "response.in_progress")
        for kind in kinds:
            yield self._numbered({"type": kind, "response": self._object("in_progress")})

    def idle(self, event: PromptProgress | None = None) -> bytes:
        # Codex closes a stream that has only comments for five minutes.
        head = {"type": "response.in_progress", "response": self._object("in_progress")}
        return self._numbered({**head, **(event.field if event else {})})

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        return map(self._numbered, self._events(event))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        if self._open is not None:
            self._open.status = "incomplete"
        response = self._object("failed", error=_error(error))
        return [self._numbered({"type": "response.failed", "response": response})]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        response = self._finished(*results)
        return [self._numbered({"type": f"response.{response['status']}", "response": response})]

    def _events(self, event: OutputEvent) -> Iterator[OutputItem]:
        parts, logprobs = self._content.parse(event), self._content.logprobs(event) or []
        if logprobs and not any(isinstance(part, Spoken) for part in parts):
            parts = [*parts, Spoken("")]
        for part in parts:
            yield from self._of_part(part, logprobs)
            logprobs = [] if isinstance(part, Spoken) else logprobs
            if isinstance(part, Arguments) and part.last and not isinstance(event, ChoiceEnd):
                yield from self._close("completed")
        if isinstance(event, ChoiceEnd):
            yield from self._close(self._status(event.result))

    def _of_part(self, part: Part, logprobs: Sequence[dict[str, Any]]) -> Iterator[OutputItem]:
        """`logprobs`: of a text."""
        match part:
            case Reasoning(text) | Spoken(text):
                reasoning = isinstance(part, Reasoning)
                item = self._open
                if not isinstance(item, TextItem) or item.reasoning != reasoning:
                    item = TextItem(len(self._items), reasoning=reasoning)
                    yield from self._begin(item)
                yield item.add(text, logprobs)
            case Call(arguments=text):
                item = self._call_item(len(self._items), part)
                yield from self._begin(item)
                yield from item.add(text)
            case Arguments(text):
                assert isinstance(self._open, CallItem)
                yield from self._open.add(text)

    def _begin(self, item: TextItem | CallItem) -> Iterator[OutputItem]:
        """Makes `item` the open one."""
        yield from self._close("completed")
        self._items.append(item)
        self._open = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[OutputItem]:
        item, self._open = self._open, None
        if item is not None:
            yield from item.end(status)

    def _finished(self, result: Result) -> dict[str, Any]:
        status = self._status(result)
        incomplete = None if status == "completed" else {"reason": "max_output_tokens"}
        response = self._object(status, incomplete_details=incomplete, usage=_usage(self._counted(result)))
        response |= sources([result]) | warned([*self._content.prompt.warnings, *self._if_cut(result)])
        self._store(response)
        return response

    def _status(self, result: Result) -> str:
        return "completed" if result.finish_reason == "stop" else "incomplete"

    def _if_cut(self, result: Result) -> list[str]:
        return self._content.prompt.if_cut([result])

    def _counted(self, result: Result) -> dict[str, Any]:
        thoughts = [item.text for item in self._items if isinstance(item, TextItem) and item.reasoning]
        return usage([result], 1, sum(map(self._count, thoughts)))

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        defaults = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **defaults, **more, "status": status, "output": [item.item for item in self._items]}


class QueuedResponse(_Numbered, WaitingStream):
    """A created response that is queued. The answer continues its id and its numbers."""

    def __init__(self, model: str) -> None:
        head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model}
        asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        super().__init__(self._numbered, {**head, **asked, "error": None, "output": []}, _error)

    @property
    def state(self) -> dict[str, Any]:
        return {"response_id": self.event["id"], "events_sent": self._sent}

    def waiting(self, loading: dict[str, Any]) -> Iterable[bytes]:
        response = {**self.event, "status": "queued"}
        first = [] if self._sent else [{"type": "response.created", "response": response}]
        events = [*first, {"type": "response.queued", "response": response, "loading": loading}]
        return [self._numbered(event) for event in events]

    def failed(self, error: ApiError) -> Iterable[bytes]:
        response = {**self.event, "status": "failed", "error": _error(error)}
        return [self._numbered({"type": "response.failed", "response": response})]


def _error(error: ApiError) -> dict[str, Any]:
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": code, "message": str(error)}


def _usage(counted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
