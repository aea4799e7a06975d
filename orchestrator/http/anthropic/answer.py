"""The response to POST /v1/messages: one message, or the events that build it up. Pure.

The message is made from the events, so that both forms have the same content.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import ChoiceEnd, OutputEvent, PromptProgress, WaitingStream, frame, warned
from orchestrator.http.openai.answer import finish_reason
from orchestrator.http.openai.answer_content import AnswerContent, call_id, usage
from orchestrator.text.answer.parts import Call, Part, Reasoning, Spoken

_SIGNATURE = "unsigned"
"""Clients return a thinking block only with a signature. This one says that nobody checks it."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer:
    """Renders the response to one request."""

    def __init__(self, model: str, content: AnswerContent, stops: Sequence[str]) -> None:
        """`stops`: the request's stop sequences."""
        self._model = model
        self._content = content
        self._stops = stops
        self._prompt = content.prompt
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._open: str | None = None
        """The type of the last block, while text may be added to it."""
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        for event in self._content.events(result):
            # Each event adds to the blocks.
            for _ in self._events(event):
                pass
        told = [*self._prompt.warnings, *self._prompt.if_cut(results)]
        return self._message(_usage(usage(results, 1))) | warned(told)

    def opening(self) -> Iterator[bytes]:
        # The number of cached tokens is known only at the end.
        (tokens,) = self._prompt.tokens
        message = self._message({"input_tokens": len(tokens), "output_tokens": 0}) | warned(self._prompt.warnings)
        yield _frame({"type": "message_start", "message": message})

    def idle(self) -> bytes:
        return _frame({"type": "ping"})

    def reading(self, event: PromptProgress) -> bytes:
        return self.idle()

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        return map(_frame, self._events(event))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [_frame(error.anthropic_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        delta = {"type": "message_delta", "delta": self._ended, "usage": _usage(usage(results, 1))}
        yield _frame(delta | warned(self._prompt.if_cut(results)))
        yield _frame({"type": "message_stop"})

    def _events(self, event: OutputEvent) -> Iterator[dict[str, Any]]:
        for part in self._content.parse(event):
            yield from self._of_part(part)
        if isinstance(event, ChoiceEnd):
            yield from self._close()
            called = any(block["type"] == "tool_use" for block in self._blocks)
            self._ended = self._stop_reason(event.result, called)

    def _of_part(self, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case Reasoning(text):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Spoken(text):
                yield from self._begin({"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case Call():
                yield from self._close()
                yield from self._call(part)

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begins a block unless one of the same type is open."""
        if self._open != block["type"]:
            yield from self._close()
            self._open = block["type"]
            yield self._block_start(block)

    def _close(self) -> Iterator[dict[str, Any]]:
        kind, self._open = self._open, None
        if kind == "thinking":
            self._blocks[-1]["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        if kind is not None:
            yield self._block_stop()

    def _call(self, call: Call) -> Iterator[dict[str, Any]]:
        block = {"type": "tool_use", "id": call_id(call), "name": call.name, "input": {}}
        yield self._block_start(block)
        self._blocks[-1]["input"] = msgspec.json.decode(call.arguments)
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield self._block_stop()

    def _stop_reason(self, result: Result, called: bool) -> dict[str, Any]:
        if not called and result.finish_reason == "stop" and result.stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stop}
        return {"stop_reason": _REASONS[finish_reason(result, called)], "stop_sequence": None}

    def _block_start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        # A copy, because the block grows later.
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _block_stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": [*self._blocks], **self._ended, "usage": usage}


class WaitingPings(WaitingStream):
    """Pings, which clients skip."""

    def waiting(self, loading: dict[str, Any]) -> Iterable[bytes]:
        return [_frame({"type": "ping", "loading": loading})]

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [_frame(error.anthropic_body())]


def _usage(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's input tokens exclude cached ones."""
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
    }


def _frame(content: dict[str, Any]) -> bytes:
    return frame(content, content["type"])
