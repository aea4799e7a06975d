"""The server as an ASGI application, over any pipeline that is spoken to like `AsyncClient`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.chat_template import ChatTemplate
from orchestrator.http.answers import Answer, Kind, model_card
from orchestrator.http.errors import ApiError, of_pipeline, unsupported
from orchestrator.http.gate import HostGate, KeyGate, refusal
from orchestrator.http.generation import Generation, Pieces
from orchestrator.http.health import Health, Knowing
from orchestrator.http.metrics import CONTENT_TYPE, Counted, Measured, Metrics
from orchestrator.http.questions import Chat, Completion, Question, read, sampling
from orchestrator.http.seats import Seats
from orchestrator.http.settings import Settings
from orchestrator.http.streaming import EventStream, frames
from orchestrator.http.tools import readable, taught
from orchestrator.sampling_params import SamplingParams
from orchestrator.tokenizer import TextCodec
from protocol.errors import PipelineError
from protocol.messages import State

_BODY_SECONDS = 30.0
"""Time that a client has for sending its question."""
_COMPLETION_TOKENS = 16
"""What OpenAI's completions generate if nothing is said; chats go on to the end of the context."""

T = TypeVar("T")


class Backend(Knowing, Protocol):
    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Pieces: ...


def application(server: "Server", settings: Settings) -> Starlette:
    """Its routes, behind the gates."""
    routes = [
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(Counted, metrics=server.figures, routes=paths),
        Middleware(HostGate, names=settings.hosts),
        Middleware(KeyGate, key=settings.key, most_bytes=settings.most_bytes),
    ]
    if settings.origins:
        # Before the key is asked for: browsers ask whether they may without one.
        cors = Middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(2, cors)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)


class Server:
    """Routes, and what they share."""

    def __init__(self, backend: Backend, codec: TextCodec, template: ChatTemplate, settings: Settings) -> None:
        self._backend = backend
        self._codec = codec
        self._template = template
        self._settings = settings
        self._taught = taught(template)
        self._health = Health(backend)
        self._seats = Seats(settings.most_open)
        self.figures = Metrics(self._seats)
        self._created = int(time.time())
        self._open: set[Generation] = set()

    async def health(self, request: Request) -> Response:
        condition = await self._health.look()
        body = {"status": condition.status, "reason": condition.reason}
        return JSONResponse(body, 200 if condition.status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.figures.text(await self._health.look()), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        cards = [model_card(name, self._created) for name in self._settings.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        return JSONResponse(model_card(self._named(request.path_params["name"]), self._created))

    async def complete(self, request: Request) -> Response:
        question = read(await _body(request), Completion)
        return await self._answer(request, "text", question, lambda: self._completion_prompts(question))

    async def chat(self, request: Request) -> Response:
        question = read(await _body(request), Chat)
        if question.offered and not self._taught:
            raise unsupported("tools", "This model's chat template knows no tools that we can read: leave them out.")
        return await self._answer(request, "chat", question, lambda: [self._conversation(question)])

    def _conversation(self, question: Chat) -> Sequence[int]:
        return self._template.tokens(readable(question.messages), question.offered or None)

    def _completion_prompts(self, question: Completion) -> list[Sequence[int]]:
        return [self._codec.encode(each) if isinstance(each, str) else each for each in question.prompts]

    async def _answer(
        self, request: Request, kind: Kind, question: Question, to_prompts: Callable[[], list[Sequence[int]]]
    ) -> Response:
        name = self._named(question.model)
        with ExitStack() as stack:
            count = question.choices * (len(question.prompts) if isinstance(question, Completion) else 1)
            self._seats.take(count)
            stack.callback(self._seats.give_back, count)
            state = await self._health.require()
            try:
                # Long texts take a while, and others' tokens are not to wait for them.
                prompts = await asyncio.to_thread(to_prompts)
            except PipelineError as error:
                raise of_pipeline(error) from error
            wanted = self._wanted(question, prompts, state, kind)
            generation = Generation([Measured(self._backend.stream(*each), self.figures) for each in wanted])
            self._open.add(generation)
            stack.callback(self._end, generation)
            answer = Answer(kind, name, len(prompts), question.with_usage)
            if isinstance(question, Chat) and question.offered:
                answer = replace(answer, tools=True, most_calls=question.most_calls)
            if not question.stream:
                return JSONResponse(answer.whole(await _unless_gone(request, generation.collect())))
            patience = self._settings.keep_alive
            # What fails at once gets a status of its own; afterwards it is too late for that.
            first = await _unless_gone(request, generation.next(patience))
            close = stack.pop_all().close
            return EventStream(frames(generation, answer, count, first, patience, close), close)

    def stop(self) -> None:
        """End what is being generated, with an answer that says why."""
        for generation in self._open:
            generation.abort(ApiError(503, "The server was stopped while it served this request: ask again later."))

    def _end(self, generation: Generation) -> None:
        generation.close()
        self._open.discard(generation)

    def _wanted(
        self, question: Question, prompts: Sequence[Sequence[int]], state: State, kind: Kind
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        """Every choice: what it continues, and how."""
        if not prompts:
            raise ApiError(400, "There is no prompt: give at least one.", param="prompt")
        wanted = []
        for tokens in prompts:
            _require_fitting(tokens, state)
            default = _COMPLETION_TOKENS if kind == "text" else None
            params = sampling(question, state.context - len(tokens), default, self._settings.defaults)
            if kind == "chat":
                params = replace(params, stop=(*params.stop, *self._template.stops))
            for index in range(question.choices):
                # Equal seeds would give equal texts.
                seed = None if params.seed is None else (params.seed + index) % (1 << 32)
                wanted.append((tokens, replace(params, seed=seed)))
        return wanted

    def _named(self, name: str | None) -> str:
        """Only what was named at the start; a name is never a path or a download."""
        if name is None:
            return self._settings.names[0]
        if name not in self._settings.names:
            known = ", ".join(self._settings.names)
            raise ApiError(404, f"There is no such model here: ask for {known}.", code="model_not_found", param="model")
        return name


def _require_fitting(tokens: Sequence[int], state: State) -> None:
    if not tokens:
        raise ApiError(400, "The prompt is empty: give at least one token to continue.", param="prompt")
    if max(tokens) >= state.vocabulary:
        raise ApiError(400, f"The prompt holds token {max(tokens)}: ids end at {state.vocabulary - 1}.", param="prompt")
    if len(tokens) >= state.context:
        raise ApiError(
            400,
            f"This model's maximum context length is {state.context} tokens, and the prompt has {len(tokens)}: "
            "shorten it.",
            code="context_length_exceeded",
        )


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.body()
    except TimeoutError as error:
        raise ApiError(408, "The request's body did not come in time: send it again.", code="timeout") from error


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result. Raises ClientDisconnect as soon as nobody waits for it any more."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


async def _on_wrong_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}."))


async def _on_gone(*_: object) -> Response:
    return Response(status_code=499)


async def _on_bug(*_: object) -> Response:
    return refusal(ApiError(500, "The server failed at this request: its log says why."))


_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _on_api_error,
    HTTPException: _on_wrong_route,
    ClientDisconnect: _on_gone,
    Exception: _on_bug,
}
