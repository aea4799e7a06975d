"""OpenAI's completion routes, and the way from a request to its response that all APIs share.

Works with any pipeline that has `AsyncClient`'s interface.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orchestrator.api.owner import attach_command
from orchestrator.api.sampling.sampling_params import SamplingParams
from orchestrator.http.access.admission_limit import AdmissionLimit, Places
from orchestrator.http.access.disconnects import OpenWork, unless_gone
from orchestrator.http.access.middleware import shows_key
from orchestrator.http.embeddings.model import embedding_model
from orchestrator.http.errors import ApiError, of_pipeline
from orchestrator.http.generation import ChoiceStream, OutputSource, Renderer
from orchestrator.http.model_cards import ANTHROPIC_VERSION, anthropic_card, anthropic_cards, model_card
from orchestrator.http.monitoring.health import LOADING, Condition, Health, StateSource
from orchestrator.http.monitoring.live import Live, Watchable
from orchestrator.http.monitoring.metrics import CONTENT_TYPE, Metrics, RequestMeasurement
from orchestrator.http.openai.answer import ChoiceAnswer, Chunks, Echo
from orchestrator.http.openai.request import ChatRequest, CompletionRequest, GenerationRequest, read
from orchestrator.http.prompts import Preparation, Prepared, RenderedChat
from orchestrator.http.request_bodies import read_body
from orchestrator.http.settings import ServerSettings
from orchestrator.http.streaming import EventStream, frames
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation


class Invitations:
    """`POST /v1/pipeline/invitation`: a join line, good for one machine."""

    def __init__(self, invite: Callable[[], Invitation] | None, pipeline: StateSource, key: str | None) -> None:
        """`invite` is None for a pipeline that no other machine can join. Without a `key` nobody is known to be the
        owner, so nobody gets a line."""
        self._invite = invite
        self._pipeline = pipeline
        self._key = key

    @property
    def offered(self) -> bool:
        return self._invite is not None and self._key is not None

    async def create(self, _: Request) -> Response:
        if self._invite is None:
            raise ApiError(404, "No machine can join this pipeline: start the server with --listen HOST:PORT.")
        if self._key is None:
            raise ApiError(
                403, "A server without a key gives no join lines: run `launch-pipeline workers invite` beside it."
            )
        try:
            state = await self._pipeline.state()
            if state is None:
                raise ApiError(503, LOADING, code="loading", headers={"retry-after": "5"})
            invitation = await asyncio.to_thread(self._invite)
        except PipelineError as error:
            raise of_pipeline(error) from error
        told: dict[str, Any] = {
            "line": invitation.line,
            "command": attach_command(invitation, state),
            "seconds": invitation.seconds,
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})


RendererFactory: TypeAlias = Callable[[RenderedChat, int], Renderer]
"""Makes the renderer of a response from the prompt and the number of its tokens."""


class Backend(StateSource, Watchable, Protocol):
    def stream(self, prompt: Sequence[int], params: SamplingParams) -> OutputSource: ...


class Server:
    """Handlers of the routes, and the state that they share."""

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        template: ChatTemplate,
        settings: ServerSettings,
        invite: Callable[[], Invitation] | None = None,
        figures: Metrics | None = None,
    ) -> None:
        """`invite` makes a join line; None if no other machine can join the pipeline. `figures`: those of all models,
        which share the places; None for a server with one model."""
        self._backend = backend
        self.codec = codec
        self._settings = settings
        self.defaults = settings.sampling_defaults(template.folder)
        """For sampling fields that a request omits."""
        self._preparation = Preparation(codec, template, self.defaults)
        self.prompts = self._preparation.prompts
        self._health = Health(backend)
        self.figures = figures or Metrics(AdmissionLimit(settings.most_open))
        self._limit = self.figures.limit
        self.embedding = embedding_model(settings, self._limit)
        self._created = int(time.time())
        self._work = OpenWork()
        self._open: set[ChoiceStream] = set()
        self.invitations = Invitations(invite, backend, settings.key)
        facts = {"models": settings.names, "chat": template.own, "defaults": self.defaults}
        self.live = Live(backend, self._health, {**facts, "joins": self.invitations.offered})

    async def health(self, request: Request) -> Response:
        condition = await self._health.check()
        body = {"status": condition.status}
        # Strangers may ask this too, and a reason can quote a log.
        if shows_key(request.headers, self._settings.key):
            body["reason"] = condition.reason
        return JSONResponse(body, 200 if condition.status == "ok" else 503)

    async def condition(self) -> Condition:
        """The pipeline's."""
        return await self._health.check()

    async def require(self) -> PipelineState:
        """The state of a pipeline that serves requests. Raises ApiError 503 if it does not."""
        return await self._health.require()

    async def metrics(self, request: Request) -> Response:
        return Response(self.figures.text(await self._health.check()), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        names, state = self._settings.names, (await self._health.check()).serving
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(anthropic_cards(names, self._created, state and state.context))
        cards = [self._card(name, state) for name in names]
        if self.embedding is not None:
            cards.append(model_card(self.embedding.name, self._created, None))
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if self.embedding is not None and name == self.embedding.name:
            return JSONResponse(model_card(name, self._created, None))
        self.model_name(name)
        state = (await self._health.check()).serving
        if ANTHROPIC_VERSION in request.headers:
            return JSONResponse(anthropic_card(name, self._created, state and state.context))
        return JSONResponse(self._card(name, state))

    def _card(self, name: str, state: PipelineState | None) -> dict[str, Any]:
        return model_card(name, self._created, state and state.level, self.defaults)

    async def complete(self, request: Request) -> Response:
        question = await read_body(request, lambda content: read(content, CompletionRequest))
        answer = ChoiceAnswer(
            "text",
            self.model_name(question.model),
            question.prompt_count,
            with_usage=question.with_usage,
            codec=None if question.told is None else self.codec,
            silent=question.silent,
            returned=question.returned if question.choices > question.returned else None,
        )

        def prepare() -> Prepared:
            def renderer(prompts: Sequence[Sequence[int]]) -> Chunks:
                echoed = self._echoed(question, prompts)
                return Chunks(replace(answer, echoed=echoed), len(prompts) * question.choices)

            return Prepared(question.prompts, renderer)

        return await self.answer(request, question, prepare)

    async def chat(self, request: Request) -> Response:
        question = await read_body(request, lambda content: read(content, ChatRequest))
        codec = None if question.alternatives is None else self.codec
        name = self.model_name(question.model)
        answer = ChoiceAnswer("chat", name, 1, with_usage=question.with_usage, codec=codec)

        def renderer(prompt: RenderedChat, _: int) -> Chunks:
            parsed = replace(
                answer,
                new_parser=prompt.new_parser,
                shown=prompt.shown,
                marked=prompt.marked,
                reasoning_tokens=self.codec.count,
                warnings=prompt.warnings,
            )
            return Chunks(parsed, question.choices)

        return await self.converse(request, question, renderer)

    async def converse(self, request: Request, question: ChatRequest, make_renderer: RendererFactory) -> Response:
        """The response to a chat request of any API."""

        def prepare() -> Prepared:
            prompt = self.prompts.render(question)

            def renderer(prompts: Sequence[Sequence[int]]) -> Renderer:
                return make_renderer(prompt, len(prompts[0]))

            return Prepared([prompt.text], renderer, prompt.grammar, prompt.shown, prompt.marked)

        return await self.answer(request, question, prepare)

    def _echoed(self, question: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[Echo]:
        """The prompt of each choice that is returned, if the client wants it back."""
        if not question.echo:
            return []
        texts = [each if isinstance(each, str) else self.codec.decode(each) for each in question.prompts]
        return [Echo(*each) for each in zip(texts, prompts, strict=True) for _ in range(question.returned)]

    async def chat_tokens(self, request: Request, question: ChatRequest) -> int:
        """Number of tokens of a chat's prompt, however long. Raises ApiError for what the model's chat template can't
        render."""
        with self._limit.take(1):
            return await self._work.unless_ended(request, self._preparation.count(question))

    async def answer(
        self,
        request: Request,
        question: GenerationRequest,
        prepare: Callable[[], Prepared],
    ) -> Response:
        """Generate all choices, and respond with one object or a stream. `prepare` is called in a thread. Raises
        ApiError."""
        with ExitStack() as stack:
            places = stack.enter_context(self._limit.take(question.choices * question.prompt_count))
            state = await self.require()
            preparing = self._preparation.ready(question, prepare, state)
            choices, renderer = await self._work.unless_ended(request, preparing)
            generation = ChoiceStream(
                [RequestMeasurement(self._backend.stream(*each), self.figures) for each in choices],
                on_end=partial(_free, request, places),
            )
            self._open.add(generation)
            stack.callback(self._end, generation)
            if not question.stream:
                results = await unless_gone(request, generation.collect())
                # The log-probabilities of a long prompt take time too.
                return await asyncio.to_thread(lambda: JSONResponse(renderer.whole(results)))
            patience = self._settings.keep_alive
            # An error before the first event still gets its own HTTP status.
            first = await unless_gone(request, generation.next(patience))
            close = stack.pop_all().close
            return EventStream(frames(generation, renderer, first, patience, close), close)

    def stop(self, error: ApiError | None = None) -> None:
        """End all work, for good; the clients get `error`, or are told that the server ends."""
        self.live.stop()
        told = self._work.stop(error)
        for generation in self._open:
            generation.abort(told)
        if self.embedding is not None:
            self.embedding.close()

    def _end(self, generation: ChoiceStream) -> None:
        generation.close()
        self._open.discard(generation)

    def model_name(self, name: str | None) -> str:
        """The model that a request names, or the default. Raises ApiError 404: a name is never a path or a download."""
        if name is None:
            return self._settings.names[0]
        if name not in (*self._settings.names, *self._settings.old_names):
            known = ", ".join(self._settings.names)
            raise ApiError(
                404, f"This server has no such model: ask for {known}.", code="model_not_found", param="model"
            )
        return name


def _free(request: Request, places: Places) -> None:
    """All generation of the request has ended: what is left of its answer needs neither places nor the model."""
    places.release()
    getattr(request.state, "on_generated", lambda: None)()
