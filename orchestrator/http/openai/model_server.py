"""One model behind the server: the way from a request to its response that all APIs share.

Works with any pipeline that has `AsyncClient`'s interface.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orchestrator.api.sampling import SamplingParams
from orchestrator.http.errors import ApiError
from orchestrator.http.generation import ChoiceStream, EventStream, OutputSource, Renderer, frames
from orchestrator.http.live import Health, StateSource, Watchable
from orchestrator.http.metrics import Metrics
from orchestrator.http.openai.history import Note
from orchestrator.http.openai.prompts import Asked, Choice, Preparation, PreparedRequest
from orchestrator.http.openai.request import ChatRequest
from orchestrator.http.settings import ServerSettings
from orchestrator.http.work import OpenWork
from orchestrator.text.answer_format import teaches_tools
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.base import MAX_CONTEXT

log = logging.getLogger(__name__)
Q = TypeVar("Q", bound=Asked)
NewRenderer: TypeAlias = Callable[[PreparedRequest], Renderer]
"""Makes the renderer of a response."""


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
        self.knows_tools = teaches_tools(template)
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

    async def encoded(self, request: Request, question: ChatRequest) -> PreparedRequest:
        """As of `Preparation`. Raises ApiError for far more text than the context has."""
        with self._figures.limit.take(1):
            serving = (await self.health.check()).serving
            # The largest of all contexts while no pipeline serves.
            context = MAX_CONTEXT if serving is None else serving.context
            return await self._work.unless_ended(request, self._preparation.encoded(question, context))

    async def answer(self, request: Request, question: Asked, new_renderer: NewRenderer) -> Response:
        """Generate all choices, and respond with one object or a stream. `new_renderer` is called in a thread. Raises
        ApiError."""
        with ExitStack() as stack:
            places = stack.enter_context(self._figures.limit.take(question.choices * question.prompt_count))
            choices, renderer = await self._work.unless_ended(request, self._ready(question, new_renderer))
            sources = [self.backend.stream(*each) for each in choices]
            generation = ChoiceStream(sources, self._figures.measured, partial(_free, request, places))
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

    async def _ready(self, question: Asked, new_renderer: NewRenderer) -> tuple[list[Choice], Renderer]:
        """The choices to generate, of a pipeline that serves. One that has just ended may take long to say so."""
        prepared, choices = await self._preparation.ready(question, await self.health.require())
        self._figures.noted({note.kind for note in prepared.notes})
        return choices, await asyncio.to_thread(new_renderer, prepared)

    def _end(self, generation: ChoiceStream) -> None:
        generation.close()
        self._open.discard(generation)

    def model_name(self, name: str | None) -> str:
        """The name that a request gives the model, or the default. Raises ApiError 404: a name is never a path or a
        download."""
        if name is None or background(name, self._settings.names):
            return self._settings.names[0]
        if name not in self._settings.names:
            raise unknown_model(self._settings.names)
        return name

    def named(self, question: Q) -> tuple[str, Q]:
        """The name of the model that answers, and the question, with a note if it names another one. Raises as
        `model_name`."""
        name = self.model_name(question.model)
        if question.model in (None, name):
            return name, replace(question, background=isinstance(question, ChatRequest) and is_task(question))
        note = Note("model", f"This server has no {question.model}, so {name} answers.")
        return name, replace(question, notes=(*question.notes, note), background=True)


_BACKGROUND = re.compile(r"claude-[\w.-]{0,40}haiku[\w.-]{0,40}|gpt-[\w.-]{1,40}-(mini|nano)[\w.-]{0,40}", re.ASCII)
"""Small models that agents ask beside the one that they are set to, for titles and summaries; there is no setting for
it in some of them."""


def background(name: str, names: Container[str]) -> bool:
    """Whether a request for `name` is answered by a model that is none of these `names`."""
    return name not in names and _BACKGROUND.fullmatch(name) is not None


_TASK = re.compile(
    r"(?i)title generator|(generate|provide|suggest|create|write|reply with)\b[^.\n]{0,60}"
    r"\b(title|tags|follow-up questions)\b|summari[sz]e\b[^.\n]{0,60}\bconversation\b"
)
"""What clients ask for by themselves: Open WebUI, opencode, Zed, LibreChat, Crush, Qwen Code."""


def is_task(question: ChatRequest) -> bool:
    """Whether a client asks by itself for a title or a summary, and nobody waits for the answer."""
    said = (str(question.messages[place].get("content")) for place in (0, -1))
    return not question.tools and any(_TASK.search(text, 0, 400) for text in said)


def unknown_model(names: Sequence[str]) -> ApiError:
    """The answer to a request for another model than these."""
    known = ", ".join(names)
    return ApiError(404, f"This server has no such model: ask for {known}.", code="model_not_found", param="model")


def _free(request: Request, places: ExitStack) -> None:
    """All generation of the request has ended: what is left of its answer needs neither places nor the model."""
    places.close()
    getattr(request.state, "on_generated", lambda: None)()
