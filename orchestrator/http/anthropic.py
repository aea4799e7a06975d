"""Anthropic's Messages API over chat requests: requests, answers, routes.

A message of this API is a list of blocks, and a user's message may hold tool results; in a chat each result is a
message. An answer is made from its events, so that both forms have the same content.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Annotated, Any, TypeVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.api.result import Result
from orchestrator.http.errors import ApiError, refuse_given
from orchestrator.http.gates import MESSAGES
from orchestrator.http.generation import ChoiceEnd, OutputEvent, PromptProgress, WaitingStream, frame, sources, warned
from orchestrator.http.openai.answer import finish_reason
from orchestrator.http.openai.answer_content import AnswerContent, arguments_object, call_id, usage
from orchestrator.http.openai.history import THOUGHTS, Note, parts
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.http.openai.request import SHARED_NAMES, ChatRequest, question
from orchestrator.http.openai.translation import TranslatedRequest, read_fields, unknown, unused
from orchestrator.http.request_bodies import read_body
from orchestrator.text.answer.parts import Arguments, Call, Part, Reasoning, Spoken

Block = Mapping[str, Any]
Message = dict[str, Any]


def messages(system: Any, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages of a chat, with the blocks of this API as contents."""
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "user":
            found += _user_messages(parts(content))
        elif role == "assistant":
            found.append(_assistant_message(parts(content)))
        else:
            found.append({"role": role, "content": content})
    return found


def _user_messages(blocks: Sequence[Any]) -> list[Message]:
    """Tool results and user texts, in their order."""
    found: list[Message] = []
    for result, group in groupby(blocks, key=lambda block: _kind(block) == "tool_result"):
        if result:
            found += map(_tool_message, group)
        else:
            found.append({"role": "user", "content": list(group)})
    return found or [{"role": "user", "content": ""}]


def _tool_message(block: Block) -> Message:
    failed = ["Error: "] if block.get("is_error") else []
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id"),
        "content": [*failed, *parts(block.get("content"))],
    }


def _assistant_message(blocks: Sequence[Any]) -> Message:
    spoken = [block for block in blocks if _kind(block) not in ("tool_use", *THOUGHTS)]
    calls = [_call(block) for block in blocks if _kind(block) == "tool_use"]
    thoughts = [block.get("thinking") for block in blocks if _kind(block) == "thinking"]
    message: Message = {"role": "assistant", "content": spoken}
    if thought := "".join(text for text in thoughts if isinstance(text, str)):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _kind(block: Any) -> object:
    return block.get("type") if isinstance(block, Mapping) else None


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


_CALLED = {
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "thinking_budget": "thinking.budget_tokens",
}
"""What fields of the chat are called here."""


class CountTokensRequest(TranslatedRequest, kw_only=True):
    """POST /v1/messages/count_tokens, which ignores sampling."""

    SAME = ("model", "tools", "thinking")
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: Any = None
    container: Any = None

    def chat(self, notes: Sequence[Note] = ()) -> ChatRequest:
        """Raises ApiError, in the words of this API."""
        refuse_given(self, dict.fromkeys(("mcp_servers", "container"), "nothing is run here but the model"))
        turns = messages(self.system, self.messages)
        fields = {**self._fields(), "messages": turns}
        # The beginning of an answer is the last message here.
        fields["continue_final_message"] = turns[-1]["role"] == "assistant" or None
        idle = unused(f"output_config.{name}" for name in unknown(self.output_config or {}, ("format",)))
        return question(fields, ChatRequest, [*notes, *idle], called=_CALLED)

    def _fields(self) -> dict[str, Any]:
        choice = self.tool_choice or {}
        return {
            **self.same,
            "tool_choice": choice or None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": (self.output_config or {}).get("format"),
        }


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    SAME = (*CountTokensRequest.SAME, "stream", *SHARED_NAMES, "seed", "reasoning_eos")
    max_tokens: Any = None
    stop_sequences: list[str] | None = None

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}


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
        self._arguments: list[str] = []
        """Of the call that is the last block."""
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        # Each event adds to the blocks.
        for _ in chain.from_iterable(map(self._events, self._content.events(result))):
            pass
        told = [*self._prompt.warnings, *self._prompt.if_cut(results)]
        return self._message(_usage(usage(results, 1))) | sources(results) | warned(told)

    def opening(self) -> Iterator[bytes]:
        # The number of cached tokens is known only at the end.
        (tokens,) = self._prompt.tokens
        message = self._message({"input_tokens": len(tokens), "output_tokens": 0}) | warned(self._prompt.warnings)
        yield _frame({"type": "message_start", "message": message})

    def idle(self, event: PromptProgress | None = None) -> bytes:
        return _frame({"type": "ping", **(event.field if event else {})})

    def render(self, event: OutputEvent) -> Iterable[bytes]:
        return map(_frame, self._events(event))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [_frame(error.anthropic_body())]

    def ending(self, results: Sequence[Result]) -> Iterable[bytes]:
        delta = {"type": "message_delta", "delta": self._ended, "usage": _usage(usage(results, 1))}
        yield _frame(delta | sources(results) | warned(self._prompt.if_cut(results)))
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
            case Call(arguments=text):
                yield from self._close()
                self._open, self._arguments = "tool_use", []
                yield self._block_start({"type": "tool_use", "id": call_id(part), "name": part.name, "input": {}})
                yield from self._call(text)
            case Arguments(text, last=last):
                yield from self._call(text, last=last)

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
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _call(self, arguments: str, *, last: bool = False) -> Iterator[dict[str, Any]]:
        self._arguments.append(arguments)
        if arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        if last:
            self._blocks[-1]["input"] = arguments_object("".join(self._arguments))
            yield from self._close()

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

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": [*self._blocks], **self._ended, "usage": usage}


def waiting_ping() -> WaitingStream:
    return WaitingStream(_frame, {"type": "ping"}, ApiError.anthropic_body)


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


Q = TypeVar("Q", bound=CountTokensRequest)


class MessagesRoutes:
    def __init__(self, server: ModelServer) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES, self.create, methods=["POST"]),
            Route(MESSAGES + "/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        question, chat = await read_body(request, lambda content: _translated(content, MessagesRequest))
        (model, chat), stops = self._server.named(chat), question.stop_sequences or []

        def answer(prompt: PreparedRequest) -> MessageAnswer:
            return MessageAnswer(model, AnswerContent(prompt, chat, self._server.codec), stops)

        return await self._server.answer(request, chat, answer)

    async def count(self, request: Request) -> Response:
        _, chat = await read_body(request, lambda content: _translated(content, CountTokensRequest))
        self._server.model_name(chat.model)
        prepared = await self._server.encoded(request, chat)
        return JSONResponse({"input_tokens": len(prepared.tokens[0])} | warned(prepared.warnings))


def _translated(content: bytes, kind: type[Q]) -> tuple[Q, ChatRequest]:
    """The request, and the chat that it stands for."""
    question, notes = read_fields(content, kind)
    return question, question.chat(notes)
