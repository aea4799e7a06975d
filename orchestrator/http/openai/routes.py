"""/v1/completions and /v1/chat/completions: the routes of OpenAI's older APIs."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.http.openai.answer import ChoiceAnswer, Echo
from orchestrator.http.openai.model_server import ModelServer
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.http.openai.request import ChatRequest, CompletionRequest, read
from orchestrator.http.request_bodies import read_body

CHATS = ("/v1/chat/completions", "/api/v0/chat/completions")
"""The second one is where clients of LM Studio ask."""


class CompletionRoutes:
    def __init__(self, server: ModelServer) -> None:
        self._server = server

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.complete, methods=["POST"]),
            *(Route(path, self.chat, methods=["POST"]) for path in CHATS),
        ]

    async def complete(self, request: Request) -> Response:
        name, question = self._server.named(await read_body(request, lambda content: read(content, CompletionRequest)))
        codec = self._server.codec

        def renderer(prompt: PreparedRequest) -> ChoiceAnswer:
            return ChoiceAnswer(
                "text",
                name,
                len(prompt.tokens) * question.choices,
                with_usage=question.with_usage,
                codec=None if question.alternatives is None else codec,
                prompt=prompt,
                echoed=self._echoed(question, prompt.tokens),
                silent=question.silent,
            )

        return await self._server.answer(request, question, renderer)

    async def chat(self, request: Request) -> Response:
        name, question = self._server.named(await read_body(request, lambda content: read(content, ChatRequest)))
        codec = self._server.codec

        def renderer(prompt: PreparedRequest) -> ChoiceAnswer:
            return ChoiceAnswer(
                "chat",
                name,
                question.choices,
                with_usage=question.with_usage,
                codec=None if question.alternatives is None else codec,
                prompt=prompt,
                reasoning_tokens=codec.count,
            )

        return await self._server.answer(request, question, renderer)

    def _echoed(self, question: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[Echo]:
        """The prompt of each choice, if the client wants it back."""
        if not question.echo:
            return []
        texts = [each if isinstance(each, str) else self._server.codec.decode(each) for each in question.prompts]
        return [Echo(*each) for each in zip(texts, prompts, strict=True) for _ in range(question.choices)]
