"""/v1/messages: the routes of Anthropic's Messages API."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.anthropic.answer import MessageAnswer
from orchestrator.http.anthropic.request import CountTokensRequest, MessagesRequest
from orchestrator.http.disconnects import body
from orchestrator.http.middleware import MESSAGES
from orchestrator.http.openai.content import AnswerContent
from orchestrator.http.request_bodies import decoded
from orchestrator.http.server import Server


class MessagesRoutes:
    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES, self.create, methods=["POST"]),
            Route(MESSAGES + "/count_tokens", self.count, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        question = decoded(await body(request), MessagesRequest)
        chat = question.chat()
        model, stops = self._server.model_name(chat.model), question.stop_sequences or []
        return await self._server.converse(
            request, chat, lambda prompt: MessageAnswer(model, AnswerContent(chat), stops, prompt)
        )

    async def count(self, request: Request) -> Response:
        chat = decoded(await body(request), CountTokensRequest).chat()
        self._server.model_name(chat.model)
        tokens = await self._server.chat_tokens(chat)
        return JSONResponse({"input_tokens": len(tokens)})
