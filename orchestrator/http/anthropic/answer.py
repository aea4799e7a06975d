"""The answer to POST /v1/messages: one message, or the events that build it up. Pure.

The message is what the events add up to, so that both ways tell the same.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import End, OutputEvent, Text
from orchestrator.http.openai.answers import ended, usage
from orchestrator.http.openai.content import AnswerContent
from orchestrator.http.renderer import frame

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer:
    """To one request."""

    idle = frame({"type": "ping"}, "ping")

    def __init__(self, model: str, parts: AnswerContent, stops: Sequence[str], prompt: int) -> None:
        """`stops`: what the client asked to stop at; `prompt`: tokens of it."""
        self._model = model
        self._parts = parts
        self._stops = stops
        self._prompt = prompt
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        for event in (Text(0, result.text), End(0, result)):
            # The blocks build up as their events are told.
            for _ in self._events(event):
                pass
        return self._message(_usage(usage(results, 1)))

    def opening(self) -> Iterator[bytes]:
        # How much of the prompt was known already is told at the end, when it is certain.
        message = self._message({"input_tokens": self._prompt, "output_tokens": 0})
        yield _named({"type": "message_start", "message": message})

    def told(self, event: OutputEvent) -> Iterable[bytes]:
        return map(_named, self._events(event))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [_named(error.anthropic_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        counted = _usage(usage(results, 1))
        yield _named({"type": "message_delta", "delta": self._ended, "usage": counted})
        yield _named({"type": "message_stop"})

    def _events(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        text, calls = self._parts.told(event)
        if text:
            if not self._blocks:
                yield self._begun({"type": "text", "text": ""})
            self._blocks[0]["text"] += text
            yield self._delta({"type": "text_delta", "text": text})
        if isinstance(event, Text):
            return
        if self._blocks:
            yield self._stopped()
        for call in calls:
            yield from self._call(call)
        self._ended = self._why(event.result, calls)

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        yield self._begun(block)
        self._blocks[-1]["input"] = msgspec.json.decode(function["arguments"])
        yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        yield self._stopped()

    def _why(self, result: Result, calls: Sequence[Any]) -> dict[str, Any]:
        if not calls and result.finish_reason == "stop" and result.stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stop}
        return {"stop_reason": _REASONS[ended(result, calls)], "stop_sequence": None}

    def _begun(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        # A copy, since the block grows.
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stopped(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _message(self, counted: dict[str, Any]) -> dict[str, Any]:
        known = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**known, "content": [*self._blocks], **self._ended, "usage": counted}


def _usage(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic counts what was known already apart from what was read."""
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }


def _named(content: dict[str, Any]) -> bytes:
    return frame(content, content["type"])
