"""From a request to what the pipeline generates for it: prompts in tokens, sampling parameters, the renderer.

This runs beside the event loop: long texts and schemas take time, which must not delay the tokens of other requests.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

from msgspec import structs

from orchestrator.api.sampling.sampling_params import SamplingParams
from orchestrator.http.access.disconnects import in_thread
from orchestrator.http.errors import ApiError, PromptTooLong
from orchestrator.http.openai.completion_request import CompletionRequest
from orchestrator.http.openai.request_models import ChatRequest, GenerationRequest, sampling
from orchestrator.http.prompts.chat_prompts import ChatPrompts
from orchestrator.http.renderer import Renderer
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import require_enforceable

_SHORT_CHARACTERS = 1 << 16
"""Of all texts of a request; longer ones take turns."""

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class PromptEncoder:
    """Encodes prompts in threads. Long texts take turns, because each takes up to 200 times its length in memory."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._turn = asyncio.Lock()

    async def encode(
        self, prompts: Sequence[Prompt], *, special: bool, context: int | None = None
    ) -> list[Sequence[int]]:
        """`special`: as in `TextCodec.encode`. Raises ApiError for a text that is too long for `context` tokens
        whatever its tokens are; other texts may be too long as well."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if context is not None:
            await asyncio.to_thread(self._require_room, texts, context)
        async with self._turn if sum(map(len, texts)) > _SHORT_CHARACTERS else nullcontext():
            return await in_thread(self._encode, prompts, special)

    def _encode(self, prompts: Sequence[Prompt], special: bool) -> list[Sequence[int]]:
        return [self._codec.encode(each, special) if isinstance(each, str) else each for each in prompts]

    def _require_room(self, texts: Sequence[str], context: int) -> None:
        for text in texts:
            # A token is a character at least, where texts have a bound at all.
            if len(text) >= context and (least := self._codec.least_tokens(text)) >= context:
                raise PromptTooLong(least, context, "at least ")


_COMPLETION_TOKENS = 16
"""Default of max_tokens in OpenAI's completions; a chat may fill the context."""


class Prepared(NamedTuple):
    """A request whose prompts are texts or tokens."""

    prompts: Sequence[Prompt]
    new_renderer: Callable[[Sequence[Sequence[int]]], Renderer]
    """Makes the renderer from the prompts' tokens."""
    grammar: Grammar | None = None
    """What the answers are held to."""
    shown: frozenset[int] = frozenset()
    """Special tokens whose text is part of the output."""
    marked: frozenset[int] = frozenset()
    """Tokens whose text in the output comes behind a mark."""


class Ready(NamedTuple):
    """A request that is ready for the pipeline."""

    choices: Sequence[tuple[Sequence[int], SamplingParams]]
    """Prompt and sampling parameters of each."""
    renderer: Renderer


class Preparation:
    """For the requests of one model. All methods raise ApiError."""

    def __init__(self, codec: TextCodec, template: ChatTemplate, defaults: Mapping[str, Any]) -> None:
        """`defaults`: as of ServerSettings."""
        self._template = template
        self._encoder = PromptEncoder(codec)
        self._defaults = defaults
        self.prompts = ChatPrompts(template)

    async def ready(self, question: GenerationRequest, prepare: Callable[[], Prepared], state: PipelineState) -> Ready:
        """`prepare` is called in a thread."""
        prepared = await asyncio.to_thread(prepare)
        special = isinstance(question, CompletionRequest) or not self._template.own
        prompts = await self._encoder.encode(prepared.prompts, special=special, context=state.context)
        return await asyncio.to_thread(self._ready, question, prepared, prompts, state)

    async def count(self, question: ChatRequest) -> int:
        """Number of tokens of a chat's prompt, however long."""
        prompt = await asyncio.to_thread(self.prompts.render, question)
        (tokens,) = await self._encoder.encode([prompt.text], special=not self._template.own)
        return len(tokens)

    def _ready(
        self, question: GenerationRequest, prepared: Prepared, prompts: Sequence[Sequence[int]], state: PipelineState
    ) -> Ready:
        _require_enforceable(question, prepared.grammar)
        if not prompts:
            raise ApiError(400, "There is no prompt: give at least one.", param="prompt")
        choices = [choice for tokens in prompts for choice in self._choices(question, prepared, tokens, state)]
        return Ready(choices, prepared.new_renderer(prompts))

    def _choices(
        self, question: GenerationRequest, prepared: Prepared, tokens: Sequence[int], state: PipelineState
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        """Those of one prompt."""
        _require_fitting(tokens, state)
        default = _COMPLETION_TOKENS if isinstance(question, CompletionRequest) else None
        room = state.context - len(tokens)
        params = sampling(question, room, default, self._defaults, prepared.grammar)
        params = structs.replace(params, shown=tuple(sorted(prepared.shown)), marked=tuple(prepared.marked))
        if not isinstance(question, CompletionRequest):
            params = structs.replace(params, stop=(*(params.stop or ()), *self._template.stops))
        # Equal seeds would give equal texts.
        seeds = (
            None if params.seed is None else (params.seed + index) % (1 << 32) for index in range(question.choices)
        )
        return [(tokens, structs.replace(params, seed=seed)) for seed in seeds]


def _require_enforceable(question: GenerationRequest, grammar: Grammar | None) -> None:
    try:
        require_enforceable(grammar)
    except PipelineError as error:
        param = "tools" if isinstance(question, ChatRequest) and question.offered else "response_format"
        raise ApiError(400, str(error), code="invalid_value", param=param) from error


def _require_fitting(tokens: Sequence[int], state: PipelineState) -> None:
    if not tokens:
        raise ApiError(400, "The prompt is empty: give at least one token to continue.", param="prompt")
    if max(tokens) >= state.vocabulary:
        raise ApiError(400, f"The prompt holds token {max(tokens)}: ids end at {state.vocabulary - 1}.", param="prompt")
    if len(tokens) >= state.context:
        raise PromptTooLong(len(tokens), state.context)
