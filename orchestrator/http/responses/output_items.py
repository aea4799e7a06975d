"""Items of a response, and the events that build each up. Pure."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OutputItem = dict[str, Any]
"""An event without its sequence number."""


class MessageItem:
    """The text of a response: one item with one content part."""

    def __init__(self, place: int) -> None:
        """`place`: index among the items of the response."""
        self._place = place
        self._id = f"msg_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._status = "in_progress"

    @property
    def item(self) -> dict[str, Any]:
        content = [] if self._status == "in_progress" else [self._part]
        return {"id": self._id, "type": "message", "status": self._status, "role": "assistant", "content": content}

    def begin(self) -> Iterator[OutputItem]:
        yield _item("added", self._place, self.item)
        yield self._of_part("response.content_part.added", part=_text("", []))

    def add(self, text: str, logprobs: Sequence[dict[str, Any]]) -> OutputItem:
        """`logprobs`: of the tokens that begin in `text`, if the request asks for them."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._of_part("response.output_text.delta", delta=text, logprobs=[*logprobs])

    def end(self, status: str) -> Iterator[OutputItem]:
        self._status = status
        part = self._part
        yield self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._of_part("response.content_part.done", part=part)
        yield _item("done", self._place, self.item)

    def interrupt(self) -> None:
        """End the item after an error, without events."""
        self._status = "incomplete"

    @property
    def _part(self) -> dict[str, Any]:
        return _text("".join(self._texts), [*self._logprobs])

    def _of_part(self, kind: str, **more: Any) -> OutputItem:
        return {"type": kind, "item_id": self._id, "output_index": self._place, "content_index": 0, **more}


class ReasoningItem:
    """Reasoning that comes before a text or a call."""

    def __init__(self, place: int) -> None:
        """`place`: as of MessageItem."""
        self._place = place
        self._id = f"rs_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._status = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def item(self) -> dict[str, Any]:
        content = [] if self._status == "in_progress" else [self._part]
        return {"id": self._id, "type": "reasoning", "status": self._status, "summary": [], "content": content}

    def begin(self) -> Iterator[OutputItem]:
        yield _item("added", self._place, self.item)
        yield self._of_part("response.content_part.added", part={"type": "reasoning_text", "text": ""})

    def add(self, text: str) -> OutputItem:
        self._texts.append(text)
        return self._of_part("response.reasoning_text.delta", delta=text)

    def end(self, status: str) -> Iterator[OutputItem]:
        self._status = status
        yield self._of_part("response.reasoning_text.done", text=self.text)
        yield self._of_part("response.content_part.done", part=self._part)
        yield _item("done", self._place, self.item)

    def interrupt(self) -> None:
        """End the item after an error, without events."""
        self._status = "incomplete"

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def _of_part(self, kind: str, **more: Any) -> OutputItem:
        return {"type": kind, "item_id": self._id, "output_index": self._place, "content_index": 0, **more}


class ToolCallItem:
    """One tool call, which is sent whole."""

    def __init__(self, place: int, call: Mapping[str, Any], namespace: str | None = None) -> None:
        """`call` in the form of chat responses."""
        self._place = place
        function = call["function"]
        self.item: dict[str, Any] = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }
        if namespace is not None:
            self.item["namespace"] = namespace

    def events(self) -> Iterator[OutputItem]:
        name, arguments = self.item["name"], self.item["arguments"]
        yield _item("added", self._place, {**self.item, "status": "in_progress", "arguments": ""})
        yield self._of_arguments("delta", delta=arguments)
        yield self._of_arguments("done", name=name, arguments=arguments)
        yield _item("done", self._place, self.item)

    def _of_arguments(self, what: str, **more: Any) -> OutputItem:
        kind = f"response.function_call_arguments.{what}"
        return {"type": kind, "item_id": self.item["id"], "output_index": self._place, **more}


class CustomToolCallItem:
    """One call of a custom tool, which is sent whole."""

    def __init__(self, place: int, call_id: str, name: str, text: str, namespace: str | None = None) -> None:
        """`text`: the tool's input."""
        self._place = place
        self.item: dict[str, Any] = {
            "id": f"ctc_{uuid.uuid4().hex}",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": call_id,
            "name": name,
            "input": text,
        }
        if namespace is not None:
            self.item["namespace"] = namespace

    def events(self) -> Iterator[OutputItem]:
        yield _item("added", self._place, {**self.item, "status": "in_progress", "input": ""})
        yield self._of_input("delta", delta=self.item["input"])
        yield self._of_input("done", input=self.item["input"])
        yield _item("done", self._place, self.item)

    def _of_input(self, what: str, **more: Any) -> OutputItem:
        kind = f"response.custom_tool_call_input.{what}"
        return {"type": kind, "item_id": self.item["id"], "output_index": self._place, **more}


def _item(what: str, place: int, item: Mapping[str, Any]) -> OutputItem:
    return {"type": f"response.output_item.{what}", "output_index": place, "item": item}


def _text(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
