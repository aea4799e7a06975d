"""/v1/messages: the routes of Anthropic's Messages API."""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.access.middleware import MESSAGES
from orchestrator.http.anthropic.answer import MessageAnswer
from orchestrator.http.anthropic.request import CountTokensRequest, MessagesRequest
from orchestrator.http.openai.answer_content import AnswerContent
from orchestrator.http.openai.chat_request import ChatRequest
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.http.openai.request_fields import read_fields
from orchestrator.http.request_bodies import read_body

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
        return JSONResponse({"input_tokens": len(await self._server.tokens(request, chat))})


def _translated(content: bytes, kind: type[Q]) -> tuple[Q, ChatRequest]:
    """The request, and the chat that it stands for."""
    question, notes = read_fields(content, kind)
    return question, question.chat(notes)
