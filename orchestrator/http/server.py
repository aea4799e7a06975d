"""What the routes share: who may ask for what, and the way from a question to its answer.

Works over any pipeline that is spoken to like `AsyncClient`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol, TypeAlias

from msgspec import structs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orchestrator.api.sampling_params import SamplingParams
from orchestrator.http.admission_limit import AdmissionLimit
from orchestrator.http.disconnects import body, unless_gone
from orchestrator.http.errors import ApiError, of_pipeline, unsupported
from orchestrator.http.generation import ChoiceStream, OutputSource
from orchestrator.http.monitoring.health import Health, Knowing
from orchestrator.http.monitoring.live import Live, Watchable
from orchestrator.http.monitoring.metrics import CONTENT_TYPE, Metrics, RequestMeasurement
from orchestrator.http.openai.answers import ChoiceAnswer, model_card
from orchestrator.http.openai.chunks import Chunks
from orchestrator.http.openai.request_models import ChatRequest, CompletionRequest, GenerationRequest, read, sampling
from orchestrator.http.openai.tool_calls import readable, taught
from orchestrator.http.renderer import Renderer
from orchestrator.http.settings import ServerSettings
from orchestrator.http.streaming import EventStream, frames
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.sampling.grammar import require_enforceable

_COMPLETION_TOKENS = 16
"""What OpenAI's completions generate if nothing is said; chats go on to the end of the context."""

Shaped: TypeAlias = Callable[[int], Renderer]


class Backend(Knowing, Watchable, Protocol):
    def stream(self, prompt: Sequence[int], params: SamplingParams) -> OutputSource: ...


class Server:
    """Routes, and what they share."""

    def __init__(self, backend: Backend, codec: TextCodec, template: ChatTemplate, settings: ServerSettings) -> None:
        self._backend = backend
        self.codec = codec
        self._template = template
        self._settings = settings
        self._taught = taught(template)
        self._health = Health(backend)
        self._seats = AdmissionLimit(settings.most_open)
        self.figures = Metrics(self._seats)
        self._created = int(time.time())
        self._open: set[ChoiceStream] = set()
        facts = {"models": settings.names, "chat": template.own, "defaults": settings.defaults}
        self.live = Live(backend, self._health, facts)

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
        return JSONResponse(model_card(self.named(request.path_params["name"]), self._created))

    async def complete(self, request: Request) -> Response:
        question = read(await body(request), CompletionRequest)
        answer = self._shown(ChoiceAnswer("text", self.named(question.model), len(question.prompts)), question)
        shape = Chunks(answer, len(question.prompts) * question.choices)
        return await self.answer(request, question, lambda: self._completion_prompts(question), lambda _: shape)

    async def chat(self, request: Request) -> Response:
        question = read(await body(request), ChatRequest)
        answer = self._shown(ChoiceAnswer("chat", self.named(question.model), 1), question)
        if question.offered:
            answer = replace(answer, tools=True, most_calls=question.most_calls)
        return await self.converse(request, question, lambda _: Chunks(answer, question.choices))

    async def converse(self, request: Request, question: ChatRequest, shaped: Shaped) -> Response:
        """An answer to a conversation, whichever API asked."""
        return await self.answer(request, question, lambda: [self.conversation(question)], shaped)

    def _shown(self, answer: ChoiceAnswer, question: GenerationRequest) -> ChoiceAnswer:
        """With what the client wants to see beside the texts."""
        codec = None if question.alternatives is None else self.codec
        return replace(answer, with_usage=question.with_usage, codec=codec)

    def conversation(self, question: ChatRequest) -> Sequence[int]:
        """What the target is to continue. Raises ApiError for what its template does not know."""
        if question.offered and not self._taught:
            raise unsupported("tools", "This model's chat template knows no tools that we can read: leave them out.")
        try:
            return self._template.tokens(readable(question.messages), question.offered or None)
        except PipelineError as error:
            raise of_pipeline(error) from error

    def _completion_prompts(self, question: CompletionRequest) -> list[Sequence[int]]:
        return [self.codec.encode(each) if isinstance(each, str) else each for each in question.prompts]

    async def answer(
        self,
        request: Request,
        question: GenerationRequest,
        to_prompts: Callable[[], list[Sequence[int]]],
        shaped: Shaped,
    ) -> Response:
        """`shaped` makes the answer's shape from the number of the prompts' tokens."""
        with ExitStack() as stack:
            count = question.choices * (len(question.prompts) if isinstance(question, CompletionRequest) else 1)
            self._seats.take(count)
            stack.callback(self._seats.give_back, count)
            state = await self._health.require()
            # Long texts and schemas take a while, and others' tokens are not to wait for them.
            prompts = await asyncio.to_thread(to_prompts)
            await asyncio.to_thread(_require_enforceable, question)
            wanted = self._wanted(question, prompts, state)
            shape = shaped(sum(map(len, prompts)))
            generation = ChoiceStream(
                [RequestMeasurement(self._backend.stream(*each), self.figures) for each in wanted]
            )
            self._open.add(generation)
            stack.callback(self._end, generation)
            if not question.stream:
                return JSONResponse(shape.whole(await unless_gone(request, generation.collect())))
            patience = self._settings.keep_alive
            # What fails at once gets a status of its own; afterwards it is too late for that.
            first = await unless_gone(request, generation.next(patience))
            close = stack.pop_all().close
            return EventStream(frames(generation, shape, first, patience, close), close)

    def stop(self) -> None:
        """End what is being generated, with an answer that says why."""
        self.live.stop()
        for generation in self._open:
            generation.abort(ApiError(503, "The server was stopped while it served this request: ask again later."))

    def _end(self, generation: ChoiceStream) -> None:
        generation.close()
        self._open.discard(generation)

    def _wanted(
        self, question: GenerationRequest, prompts: Sequence[Sequence[int]], state: PipelineState
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        """Every choice: what it continues, and how."""
        if not prompts:
            raise ApiError(400, "There is no prompt: give at least one.", param="prompt")
        wanted = []
        for tokens in prompts:
            _require_fitting(tokens, state)
            default = _COMPLETION_TOKENS if isinstance(question, CompletionRequest) else None
            params = sampling(question, state.context - len(tokens), default, self._settings.defaults)
            if not isinstance(question, CompletionRequest):
                params = structs.replace(params, stop=(*params.stop, *self._template.stops))
            for index in range(question.choices):
                # Equal seeds would give equal texts.
                seed = None if params.seed is None else (params.seed + index) % (1 << 32)
                wanted.append((tokens, structs.replace(params, seed=seed)))
        return wanted

    def named(self, name: str | None) -> str:
        """Only what was named at the start; a name is never a path or a download."""
        if name is None:
            return self._settings.names[0]
        if name not in self._settings.names:
            known = ", ".join(self._settings.names)
            raise ApiError(404, f"There is no such model here: ask for {known}.", code="model_not_found", param="model")
        return name


def _require_enforceable(question: GenerationRequest) -> None:
    try:
        require_enforceable(question.grammar)
    except PipelineError as error:
        param = "tools" if isinstance(question, ChatRequest) and question.offered else "response_format"
        raise ApiError(400, str(error), code="invalid_value", param=param) from error


def _require_fitting(tokens: Sequence[int], state: PipelineState) -> None:
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
