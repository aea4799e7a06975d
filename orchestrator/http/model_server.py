"""One model behind the server: the way from a request to its response that all APIs share.

Works with any pipeline that has `AsyncClient`'s interface.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orchestrator.api.sampling import SamplingParams
from orchestrator.http.access.admission_limit import Places
from orchestrator.http.access.disconnects import OpenWork
from orchestrator.http.chat_request import ChatRequest, GenerationRequest
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import ChoiceStream, OutputSource, Renderer
from orchestrator.http.monitoring.health import Condition, Health, StateSource
from orchestrator.http.monitoring.live import Watchable
from orchestrator.http.monitoring.metrics import Metrics, RequestMeasurement
from orchestrator.http.prompts import Preparation, PreparedRequest, Ready, RenderedChat
from orchestrator.http.settings import ServerSettings
from orchestrator.http.streaming import EventStream, frames
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.base import MAX_CONTEXT
from protocol.messages.client import PipelineState

log = logging.getLogger(__name__)

RendererFactory: TypeAlias = Callable[[RenderedChat, int], Renderer]
"""Makes the renderer of a response from the prompt and the number of its tokens."""


class Backend(StateSource, Watchable, Protocol):
    def stream(self, prompt: Sequence[int], params: SamplingParams) -> OutputSource: ...


class ModelServer:
    """What the routes that a model answers share."""

    def __init__(
        self, backend: Backend, codec: TextCodec, template: ChatTemplate, settings: ServerSettings, figures: Metrics
    ) -> None:
        """`figures`: those of all models, which share the places."""
        self.backend = backend
        self.codec = codec
        self.template = template
        self._settings = settings
        self.defaults = settings.sampling_defaults(template.folder)
        """For sampling fields that a request omits."""
        self._preparation = Preparation(codec, template, self.defaults)
        self.prompts = self._preparation.prompts
        self.health = Health(backend)
        self._figures = figures
        self._work = OpenWork()
        self._open: set[ChoiceStream] = set()
        for fault in template.faults:
            log.warning("%s can't chat, only complete texts. %s", settings.names[0], fault)

    @property
    def folder(self) -> Path:
        """Of the target."""
        return self.template.folder

    async def condition(self) -> Condition:
        """The pipeline's."""
        return await self.health.check()

    async def require(self) -> PipelineState:
        """The state of a pipeline that serves requests. Raises ApiError 503 if it does not."""
        return await self.health.require()

    async def converse(self, request: Request, question: ChatRequest, make_renderer: RendererFactory) -> Response:
        """The response to a chat request of any API."""

        def prepare() -> PreparedRequest:
            prompt = self.prompts.render(question)

            def renderer(prompts: Sequence[Sequence[int]]) -> Renderer:
                return make_renderer(prompt, len(prompts[0]))

            return PreparedRequest(
                [prompt.text],
                renderer,
                prompt.grammar,
                prompt.shown,
                prompt.marked,
                prompt.thought,
                prompt.rules,
                prompt.notes,
            )

        return await self.answer(request, question, prepare)

    async def chat_tokens(self, request: Request, question: ChatRequest) -> Sequence[int]:
        """The tokens of a chat's prompt. Raises ApiError for what the model's chat template can't render, and for far
        more text than the context has."""
        with self._figures.limit.take(1):
            work = self._preparation.chat_tokens(question, await self._context())
            return await self._work.unless_ended(request, work)

    async def text_tokens(self, request: Request, text: str, *, special: bool) -> Sequence[int]:
        """The tokens of a text. `special`: as in `TextCodec.encode`. Raises ApiError for far more text than the context
        has."""
        with self._figures.limit.take(1):
            work = self._preparation.text_tokens(text, await self._context(), special=special)
            return await self._work.unless_ended(request, work)

    async def rendered(self, request: Request, question: ChatRequest) -> RenderedChat:
        """Raises ApiError for what the model's chat template can't render."""
        with self._figures.limit.take(1):
            return await self._work.unless_ended(request, asyncio.to_thread(self.prompts.render, question))

    async def answer(
        self,
        request: Request,
        question: GenerationRequest,
        prepare: Callable[[], PreparedRequest],
    ) -> Response:
        """Generate all choices, and respond with one object or a stream. `prepare` is called in a thread. Raises
        ApiError."""
        with ExitStack() as stack:
            places = stack.enter_context(self._figures.limit.take(question.choices * question.prompt_count))
            work = self._ready(question, lambda: self._noted(prepare()))
            choices, renderer = await self._work.unless_ended(request, work)
            sources = [RequestMeasurement(self.backend.stream(*each), self._figures) for each in choices]
            generation = ChoiceStream(sources, on_end=partial(_free, request, places))
            self._open.add(generation)
            stack.callback(self._end, generation)
            if not question.stream:
                results = await self._work.unless_ended(request, generation.collect())
                # The log-probabilities of a long prompt take time too.
                return await asyncio.to_thread(lambda: JSONResponse(renderer.whole(results)))
            patience = self._settings.keep_alive
            # An error before the first event still gets its own HTTP status.
            first = await self._work.unless_ended(request, generation.next(patience))
            close = stack.pop_all().close
            stream = EventStream(frames(generation, renderer, first, patience, close), close)
            # The live page looks for its own request in telemetry.
            stream.headers["x-request"] = sources[0].request
            return stream

    def stop(self, error: ApiError | None = None) -> None:
        """End all work, for good; the clients get `error`, or are told that the server ends."""
        told = self._work.stop(error)
        for generation in self._open:
            generation.abort(told)

    async def _context(self) -> int:
        """The pipeline's, or the largest of all while none serves."""
        serving = (await self.condition()).serving
        return MAX_CONTEXT if serving is None else serving.context

    def _noted(self, prepared: PreparedRequest) -> PreparedRequest:
        self._figures.noted({note.kind for note in prepared.notes})
        return prepared

    async def _ready(self, question: GenerationRequest, prepare: Callable[[], PreparedRequest]) -> Ready:
        """The choices to generate, of a pipeline that serves. One that has just ended may take long to say so."""
        return await self._preparation.ready(question, prepare, await self.require())

    def _end(self, generation: ChoiceStream) -> None:
        generation.close()
        self._open.discard(generation)

    def model_name(self, name: str | None) -> str:
        """The name that a request gives the model, or the default. Raises ApiError 404: a name is never a path or a
        download."""
        if name is None:
            return self._settings.names[0]
        if name not in self._settings.names:
            raise unknown_model(self._settings.names)
        return name


def unknown_model(names: Sequence[str]) -> ApiError:
    """The answer to a request for another model than these."""
    known = ", ".join(names)
    return ApiError(404, f"This server has no such model: ask for {known}.", code="model_not_found", param="model")


def _free(request: Request, places: Places) -> None:
    """All generation of the request has ended: what is left of its answer needs neither places nor the model."""
    places.release()
    getattr(request.state, "on_generated", lambda: None)()
