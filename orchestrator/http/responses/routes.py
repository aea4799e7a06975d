"""/v1/responses: the routes of OpenAI's Responses API, and the memory of responses that later requests refer to."""

import asyncio
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.errors import ApiError
from orchestrator.http.generation import warned
from orchestrator.http.openai.answer_content import AnswerContent
from orchestrator.http.openai.model_server import ModelServer, NewRenderer
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.http.openai.request import ChatRequest
from orchestrator.http.openai.translation import read_fields
from orchestrator.http.request_bodies import read_body
from orchestrator.http.responses.answer import ResponseAnswer
from orchestrator.http.responses.compaction import SummaryAnswer, by_users, compaction, demands
from orchestrator.http.responses.request import ADDED_TOOLS, Items, OfferedTools
from orchestrator.http.responses.request import Response as Question

_PATH = "/v1/responses"
_STORE_BYTES = 64 << 20


class _Asked(NamedTuple):
    question: Question
    before: Items
    """Items that it continues."""
    chat: ChatRequest
    """What it stands for."""
    tools: OfferedTools
    summary: bool
    """The last item asks for a summary of the others."""


class ResponsesRoutes:
    """The routes that need a model."""

    def __init__(self, server: ModelServer, store: "ResponseStore") -> None:
        self._server = server
        self._store = store

    @property
    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self.create, methods=["POST"]),
            Route(_PATH + "/input_tokens", self.count, methods=["POST"]),
            Route(_PATH + "/compact", self.compact, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        # In a thread however short: what it continues may be long.
        question, before, chat, tools, summary = await read_body(request, self._read, aside=True)
        name, chat = self._server.named(chat)
        head = self._head(name, question, chat)
        # A stream that waited for its model has begun this response.
        head["id"] = getattr(request.state, "response_id", head["id"])
        sent: int = getattr(request.state, "events_sent", 0)

        def store(answer: dict[str, Any]) -> None:
            if question.kept:
                items = [*before, *question.items]
                tools = [item for item in items if item.get("type") == ADDED_TOOLS]
                kept = [*tools, *by_users(items[:-1])] if summary else items
                self._store.add(answer["id"], answer, [*kept, *answer["output"]])

        make = SummaryAnswer if summary else ResponseAnswer
        return await self._server.answer(request, chat, self._answers(make, head, chat, tools, store, sent))

    async def compact(self, request: Request) -> Response:
        question, before, chat, tools, _ = await read_body(request, partial(self._read, compact=True), aside=True)
        name, chat = self._server.named(chat)
        answers = self._answers(SummaryAnswer, self._head(name, question, chat), chat, tools, lambda _: None)
        response = await self._server.answer(request, chat, answers)
        return JSONResponse(compaction(msgspec.json.decode(response.body), [*before, *question.items[:-1]]))

    def _answers(
        self,
        make: type[ResponseAnswer],
        head: Mapping[str, Any],
        chat: ChatRequest,
        tools: OfferedTools,
        store: Callable[[dict[str, Any]], None],
        sent: int = 0,
    ) -> NewRenderer:
        """Arguments as of ResponseAnswer."""

        def answer(prompt: PreparedRequest) -> ResponseAnswer:
            codec = self._server.codec
            return make(head, AnswerContent(prompt, chat, codec), store, codec.count, tools.call_item, sent)

        return answer

    async def count(self, request: Request) -> Response:
        _, _, chat, _, _ = await read_body(request, self._read, aside=True)
        self._server.model_name(chat.model)
        prepared = await self._server.encoded(request, chat)
        counted = {"object": "response.input_tokens", "input_tokens": len(prepared.tokens[0])}
        return JSONResponse(counted | warned(prepared.warnings))

    def _read(self, content: bytes, *, compact: bool = False) -> _Asked:
        """`compact`: a summary is asked for by the route."""
        question, notes = read_fields(content, Question)
        items = question.items
        summary = compact or demands(items)
        if compact:
            question.same.pop("stream", None)
        if summary:
            question = question.demanding_summary(items if compact else items[:-1])
        id = question.previous_response_id
        before = [] if id is None else self._store.get(id, 400, "previous_response_id").items
        return _Asked(question, before, question.chat(before, notes), question.offered(before), summary)

    def _head(self, name: str, question: Question, chat: ChatRequest) -> dict[str, Any]:
        """The fields of the response that repeat the request, with defaults filled in."""
        given = {**self._server.defaults, **{key: value for key, value in question.same.items() if value is not None}}
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            "instructions": question.instructions,
            "max_output_tokens": question.max_output_tokens,
            "metadata": question.metadata or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": question.previous_response_id,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "store": question.kept,
            "temperature": given["temperature"],
            "top_logprobs": chat.alternatives or 0,
            "top_p": given["top_p"],
            "text": question.text or {"format": {"type": "text"}},
            "tool_choice": question.tool_choice or "auto",
            "tools": question.tools or [],
            "truncation": "disabled",
            **({"user": given["user"]} if "user" in given else {}),
        }


class StoredTurn(msgspec.Struct):
    """One response, and all items of its conversation, its own output included."""

    answer: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """Holds the responses that fit into `most_bytes`; the least recently used ones are dropped. For any thread."""

    def __init__(self, most_bytes: int = _STORE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        """Of what follows. Nobody encodes or decodes while holding it."""
        self._turns: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    @property
    def routes(self) -> list[Route]:
        return [Route(_PATH + "/{id}", self._stored, methods=["GET", "DELETE"])]

    async def _stored(self, request: Request) -> Response:
        """Return a response that was given before, by any model, or delete it."""
        id = request.path_params["id"]
        if request.method != "DELETE":
            return await asyncio.to_thread(lambda: JSONResponse(self.get(id).answer))
        self.delete(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    def add(self, id: str, answer: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        encoded = msgspec.json.encode({"answer": answer, "items": items})
        with self._lock:
            self._turns[id] = encoded
            self._bytes += len(encoded)
            while self._bytes > self._most_bytes:
                _, dropped = self._turns.popitem(last=False)
                self._bytes -= len(dropped)

    def get(self, id: str, status: int = 404, param: str | None = None) -> StoredTurn:
        """Raises ApiError with `status` for a response that was not stored or was dropped."""
        with self._lock:
            encoded = self._turns.get(id)
            if encoded is None:
                raise _unknown(id, status, param)
            self._turns.move_to_end(id)
        return msgspec.json.decode(encoded, type=StoredTurn)

    def delete(self, id: str) -> None:
        """Raises ApiError 404 for a response that is not stored."""
        with self._lock:
            encoded = self._turns.pop(id, None)
            if encoded is None:
                raise _unknown(id, 404, None)
            self._bytes -= len(encoded)


def _unknown(id: str, status: int, param: str | None) -> ApiError:
    return ApiError(
        status,
        f"This server does not hold response {id!r} (any more): send the conversation itself as input.",
        code="previous_response_not_found" if param else "not_found",
        param=param,
    )
