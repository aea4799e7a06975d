"""/api/chat and /api/generate: the routes of Ollama's API that a model answers."""

from collections.abc import Sequence
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.body_reading import read_body
from orchestrator.http.errors import unsupported
from orchestrator.http.ollama.answer import MEDIA_TYPE, OllamaAnswer, empty_line
from orchestrator.http.ollama.names import keep_seconds, own_name
from orchestrator.http.ollama.request import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from orchestrator.http.openai.completion_request import CompletionRequest
from orchestrator.http.openai.content import AnswerContent
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.prompts.chat_prompts import RenderedChat
from orchestrator.http.prompts.preparation import Prepared
from orchestrator.http.request_bodies import decoded
from orchestrator.http.server import Server
from orchestrator.http.streaming import EventStream
from orchestrator.text.answer.answer_format import MarkedParser
from protocol.messages.grammar import Grammar

CHAT, GENERATE = "/api/chat", "/api/generate"
_RawCompletion: TypeAlias = tuple[CompletionRequest, Grammar | None]


class OllamaRoutes:
    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [Route(CHAT, self.chat, methods=["POST"]), Route(GENERATE, self.generate, methods=["POST"])]

    async def chat(self, request: Request) -> Response:
        question, asked = await read_body(request, _chat)
        if asked is None:
            return await self._empty(question, chat=True)
        return await self._converse(request, question, asked, chat=True)

    async def generate(self, request: Request) -> Response:
        question, asked = await read_body(request, _generation)
        if asked is None:
            return await self._empty(question, chat=False)
        if isinstance(asked, ChatRequest):
            return await self._converse(request, question, asked, chat=False)
        return await self._continue(request, *asked)

    async def _converse(self, request: Request, question: OllamaRequest, asked: ChatRequest, *, chat: bool) -> Response:
        name = self._server.model_name(asked.model)
        if question.think and not self._server.prompts.form.thinks:
            raise unsupported("think", f"{name} writes no thinking that can be told from its text: leave think out.")

        def answer(prompt: RenderedChat, _: int) -> OllamaAnswer:
            content = AnswerContent(prompt.new_parser(), calls=bool(asked.offered))
            return OllamaAnswer(name, content, chat=chat, loading=_loading(request), warnings=prompt.warnings)

        return _lines(await self._server.converse(request, asked, answer))

    async def _continue(self, request: Request, asked: CompletionRequest, grammar: Grammar | None) -> Response:
        name = self._server.model_name(asked.model)

        def renderer(_: Sequence[Sequence[int]]) -> OllamaAnswer:
            return OllamaAnswer(name, AnswerContent(MarkedParser(), calls=False), chat=False, loading=_loading(request))

        def prepare() -> Prepared:
            return Prepared(asked.prompts, renderer, grammar)

        return _lines(await self._server.answer(request, asked, prepare))

    async def _empty(self, question: OllamaRequest, *, chat: bool) -> Response:
        """A request without a prompt only loads the model, or with a keep_alive of 0 unloads it.

        Raises ApiError 503 if the model is not loaded.
        """
        question.refuse_unsupported()
        name = self._server.model_name(own_name(question.model))
        gone = question.keep_alive is not None and keep_seconds(question.keep_alive) == 0
        if not gone:
            await self._server.require()
        return JSONResponse(empty_line(name, chat=chat, done=True, done_reason="unload" if gone else "load"))


def _chat(content: bytes) -> tuple[OllamaChatRequest, ChatRequest | None]:
    """The request, and the chat that it stands for, if it has messages."""
    question = decoded(content, OllamaChatRequest)
    return question, question.chat() if question.messages else None


def _generation(content: bytes) -> tuple[OllamaGenerateRequest, ChatRequest | _RawCompletion | None]:
    """The request, and the chat or the completion that it stands for, if it has a prompt."""
    question = decoded(content, OllamaGenerateRequest)
    if not question.prompt:
        return question, None
    return question, question.completion() if question.raw else question.chat()


def _loading(request: Request) -> float:
    """How long the request waited for its model."""
    return getattr(request.state, "loading_seconds", 0.0)


def _lines(response: Response) -> Response:
    if isinstance(response, EventStream):
        response.headers["content-type"] = MEDIA_TYPE
    return response
