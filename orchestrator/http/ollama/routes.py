"""/api/chat and /api/generate: the routes of Ollama's API that a model answers."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.http.access.disconnects import body
from orchestrator.http.chat_prompts import RenderedChat
from orchestrator.http.errors import unsupported
from orchestrator.http.ollama.answer import MEDIA_TYPE, OllamaAnswer, empty_line
from orchestrator.http.ollama.names import keep_seconds, own_name
from orchestrator.http.ollama.request import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from orchestrator.http.openai.content import AnswerContent
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.http.preparation import Prepared
from orchestrator.http.request_bodies import decoded
from orchestrator.http.server import Server
from orchestrator.http.streaming import EventStream
from orchestrator.text.answer.answer_format import MarkedParser

CHAT, GENERATE = "/api/chat", "/api/generate"


class OllamaRoutes:
    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [Route(CHAT, self.chat, methods=["POST"]), Route(GENERATE, self.generate, methods=["POST"])]

    async def chat(self, request: Request) -> Response:
        question = decoded(await body(request), OllamaChatRequest)
        if not question.messages:
            return await self._empty(question, chat=True)
        return await self._converse(request, question, question.chat(), chat=True)

    async def generate(self, request: Request) -> Response:
        question = decoded(await body(request), OllamaGenerateRequest)
        if not question.prompt:
            return await self._empty(question, chat=False)
        if question.raw:
            return await self._continue(request, question)
        return await self._converse(request, question, question.chat(), chat=False)

    async def _converse(self, request: Request, question: OllamaRequest, asked: ChatRequest, *, chat: bool) -> Response:
        name = self._server.model_name(asked.model)
        if question.think and not self._server.prompts.form.thinks:
            raise unsupported("think", f"{name} writes no thinking that can be told from its text: leave think out.")

        def answer(prompt: RenderedChat, _: int) -> OllamaAnswer:
            content = AnswerContent(prompt.new_parser(), calls=bool(asked.offered))
            return OllamaAnswer(name, content, chat=chat, loading=_loading(request), warnings=prompt.warnings)

        return _lines(await self._server.converse(request, asked, answer))

    async def _continue(self, request: Request, question: OllamaGenerateRequest) -> Response:
        asked, grammar = question.completion()
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


def _loading(request: Request) -> float:
    """How long the request waited for its model."""
    return getattr(request.state, "loading_seconds", 0.0)


def _lines(response: Response) -> Response:
    if isinstance(response, EventStream):
        response.headers["content-type"] = MEDIA_TYPE
    return response
