"""/v1/responses: OpenAI's Responses API, asked through the server that all routes share."""

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.disconnects import body
from orchestrator.http.openai.content import AnswerContent
from orchestrator.http.openai.logprobs import LogprobTranscript
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.request_bodies import decoded
from orchestrator.http.responses.answer import ResponseAnswer
from orchestrator.http.responses.request import Items
from orchestrator.http.responses.request import Response as Question
from orchestrator.http.responses.store import ResponseStore
from orchestrator.http.server import Server
from orchestrator.http.settings import ServerSettings

_PATH = "/v1/responses"
_MEMORY_BYTES = 64 << 20


class ResponsesRoutes:
    def __init__(self, server: Server, settings: ServerSettings) -> None:
        self._server = server
        self._settings = settings
        self._memory = ResponseStore(_MEMORY_BYTES)

    @property
    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self.create, methods=["POST"]),
            Route(_PATH + "/{id}", self.retrieve, methods=["GET"]),
            Route(_PATH + "/{id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        question = decoded(await body(request), Question)
        before = self._before(question)
        chat = question.chat(before)
        items = [*before, *question.items]
        head = self._head(question, chat)

        def keep(answer: dict[str, Any]) -> None:
            if question.kept:
                self._memory.keep(answer["id"], answer, [*items, *answer["output"]])

        transcript = None if chat.alternatives is None else LogprobTranscript("chat", self._server.codec)
        answer = ResponseAnswer(head, AnswerContent(chat), transcript, keep)
        return await self._server.converse(request, chat, lambda _: answer)

    async def retrieve(self, request: Request) -> Response:
        return JSONResponse(self._memory.recall(request.path_params["id"]).answer)

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._memory.forget(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    def _before(self, question: Question) -> Items:
        id = question.previous_response_id
        return [] if id is None else self._memory.recall(id, 400, "previous_response_id").items

    def _head(self, question: Question, chat: ChatRequest) -> dict[str, Any]:
        """What the answer repeats of the question, with defaults filled in."""
        defaults = self._settings.defaults
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._server.named(chat.model),
            "instructions": question.instructions,
            "max_output_tokens": question.max_output_tokens,
            "metadata": question.metadata or {},
            "parallel_tool_calls": question.parallel_tool_calls is not False,
            "previous_response_id": question.previous_response_id,
            "store": question.kept,
            "temperature": _first(question.temperature, defaults.get("temperature"), 1.0),
            "top_logprobs": chat.alternatives or 0,
            "top_p": _first(question.top_p, defaults.get("top_p"), 1.0),
            "text": question.text or {"format": {"type": "text"}},
            "tool_choice": question.tool_choice or "auto",
            "tools": question.tools or [],
            "truncation": "disabled",
            "user": question.user,
        }


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
