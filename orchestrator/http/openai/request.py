"""What clients may ask in a chat or a completion, checked and turned into sampling parameters. Pure.

The form of OpenAI's API. Other APIs translate their requests to it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from orchestrator.api.sampling import SamplingParams, number_fields
from orchestrator.http.errors import ApiError, refuse_given, unsupported, wrong
from orchestrator.http.openai.history import Note, readable
from orchestrator.http.openai.structured_output import allowed, call_grammar, response_grammar
from orchestrator.http.openai.translation import function_tools, unknown, unused, usual
from orchestrator.http.request_bodies import converted, decoded
from orchestrator.text.answer_format import CallWriter
from orchestrator.text.families.qwen import JSON_CALLS
from protocol.errors import InputError
from protocol.messages.base import MAX_ALTERNATIVES, MAX_CONTEXT, MAX_FUNCTIONS, Token
from protocol.messages.grammar import Grammar

NOT_IN_BODIES = {
    "repetition_context": "no API that clients speak has such a field",
    "logprobs": "each API asks for log-probabilities in its own way",
}
"""Fields of `SamplingFields` that no request body has, and why."""
ONLY_OF_COMPLETIONS = {
    "frequency_penalty": "neither the Responses API nor Anthropic's has it",
    "presence_penalty": "neither the Responses API nor Anthropic's has it",
}
"""Fields that only chat completions and completions have, and why."""
_FIELDS = number_fields(NOT_IN_BODIES)
BODY_NAMES = tuple(field.name for field in _FIELDS)
SHARED_NAMES = tuple(name for name in BODY_NAMES if name not in ONLY_OF_COMPLETIONS)
"""Fields that every API has. All but completions pass them on to the chat request unchecked."""

if TYPE_CHECKING:

    class CheckedSamplingFields(msgspec.Struct, kw_only=True):
        """BODY_NAMES with their ranges; None is "not given"."""

else:
    CheckedSamplingFields = msgspec.defstruct(
        "CheckedSamplingFields",
        [(field.name, field.annotation | None, None) for field in _FIELDS],
        kw_only=True,
    )


MOST_CHOICES = 16
MOST_MESSAGES = 10_000
"""Of a chat; a template may compare each with those before it."""
IGNORED: tuple[object, ...] = (None, False, 0, [], {})
"""Values that ask for nothing."""


ReasoningEos: TypeAlias = Literal["keep", "close"]
"""What an end inside a thought ends: the answer, or the thought."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationRequest(CheckedSamplingFields, kw_only=True):
    """What both kinds of completion have in common; None is what clients send for "not given"."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    user: Any = None
    notes: tuple[Note, ...] = ()
    """Set by the server, whatever a body says."""
    background: bool = False
    """Nobody waits for the answer; set as `notes`."""

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """Tokens that the client wants at most."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the most probable tokens are told beside each chosen one; None if nothing is."""
        return None

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """Tools that the model is to know of. Raises ApiError."""
        return ()

    @property
    def prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are told too."""
        return False

    def refuse_unsupported(self) -> None:
        """Raises ApiError for what would change the answer, if this server could do it."""


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    response_format: Any = None
    tools: Annotated[tuple[dict[str, Any], ...], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    enable_thinking: bool | None = None
    reasoning_eos: ReasoningEos | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        if self.tool_choice == "none":
            return ()
        tools, _ = allowed(self.tools or (), self.tool_choice)
        return tuple(map(dict, tools))

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message, which is the assistant's."""
        last = self.messages[-1]
        begun = last.get("role") == "assistant" and not last.get("tool_calls")
        return begun and (self.continue_final_message is True or self.add_generation_prompt is False)

    @property
    def most_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def grammar(self, write: CallWriter = JSON_CALLS) -> Grammar | None:
        """What the answer is held to, calls in the syntax of `write`. Raises ApiError."""
        form = None if self.response_format in IGNORED else response_grammar(self.response_format)
        _, choice = allowed(self.tools or (), self.tool_choice)
        return call_grammar(self.offered, choice, self.most_calls, form, write) or form

    def refuse_unsupported(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs to be true.")
        self.grammar()
        for name in RESERVED_VARIABLES & (self.chat_template_kwargs or {}).keys():
            raise unsupported("chat_template_kwargs", f"{name} can't be set by chat_template_kwargs: leave it out.")
        refuse_given(self, dict.fromkeys(("functions", "function_call", "audio"), "leave it out"), ("none", "auto"))
        if self.modalities not in (*IGNORED, ["text"]):
            raise unsupported("modalities", "Only text is supported.")


RESERVED_VARIABLES = frozenset(("self", "messages", "tools", "add_generation_prompt", "answering", "continued"))
"""Variables of chat templates that requests may not choose."""


Q = TypeVar("Q", bound=GenerationRequest)


def read(body: bytes, kind: type[Q]) -> Q:
    """The question in a request's body. Raises ApiError naming what is wrong with it."""
    repaired: list[str] = []
    fields = usual(decoded(body, dict[str, Any], repaired))
    return question(
        fields,
        kind,
        [*unused(unknown(fields, kind.__struct_fields__)), *(Note("character", text) for text in repaired)],
    )


def question(
    fields: Mapping[str, Any], kind: type[Q], notes: Sequence[Note] = (), *, called: Mapping[str, str] | None = None
) -> Q:
    """The question that these fields ask; a field that is None counts as absent. `notes`: what the API that they come
    from has changed. `called`: what that API calls some of them. Raises ApiError naming what is wrong with it."""
    fields = {**usual(fields), "notes": None, "background": None}
    try:
        if isinstance(fields.get("tools"), list | tuple):
            fields["tools"], told = function_tools(fields["tools"])
            notes = [*notes, *told]
        found = converted(fields, kind)
        if isinstance(found, ChatRequest):
            history = readable(found.messages)
            found = replace(found, messages=tuple(history.messages))
            notes = [*notes, *history.notes]
        found = replace(found, notes=tuple(notes))
        found.refuse_unsupported()
    except ApiError as error:
        raise error.in_words_of(called or {}) from error
    return found


def sampling(
    question: GenerationRequest,
    room: int,
    default_tokens: int | None,
    defaults: Mapping[str, float],
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Of the first choice. `room`: tokens that fit behind the prompt; `defaults`: for what the question leaves open;
    `grammar`: what the answer is held to."""
    given = {name: value for name in BODY_NAMES if (value := getattr(question, name)) is not None}
    params = SamplingParams(
        **{**defaults, **given},
        seed=None if question.seed is None else question.seed % (1 << 32),
        stop=_stops(question.stop),
        max_tokens=max(1, min(question.limit or default_tokens or room, room)),
        logit_bias=_bias(question.logit_bias or {}),
        grammar=grammar,
        logprobs=question.alternatives,
        prompt_logprobs=question.prompt_logprobs,
    )
    try:
        params.submit("", "check")
    except InputError as error:
        raise wrong(None, str(error)) from error
    return params


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(each for each in ((stop,) if isinstance(stop, str) else stop or ()) if each)


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
        raise ApiError(400, 'logit_bias maps token ids to numbers, for instance {"50": -100}.', param="logit_bias")
    return {int(token): value for token, value in bias.items()}


class CompletionRequest(GenerationRequest, kw_only=True):
    """None is what clients send for "not given"."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    prompt: str | tuple[str | Token | tuple[Token, ...], ...]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | bool | None = None
    echo: bool | None = None
    suffix: Any = None
    response_format: Any = None

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each one gets its own choices. A list of ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if any(isinstance(each, int) for each in self.prompt):
            ids = tuple(each for each in self.prompt if isinstance(each, int))
            if len(ids) < len(self.prompt):
                raise ApiError(400, "prompt mixes token ids with texts or lists: send one kind.", param="prompt")
            return [ids]
        return [each for each in self.prompt if not isinstance(each, int)]

    @property
    def prompt_count(self) -> int:
        """As the first element has it; a mixed list is refused by `prompts`."""
        return 1 if isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int) else len(self.prompt)

    @property
    def limit(self) -> int | None:
        # The pipeline generates at least one token.
        return 1 if self.silent else self.max_tokens

    @property
    def silent(self) -> bool:
        """The client wants nothing but its prompt back."""
        return self.max_tokens == 0

    @property
    def prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.alternatives is not None

    @property
    def alternatives(self) -> int | None:
        """0 asks for the chosen tokens' alone."""
        return None if self.logprobs is False or self.logprobs is None else int(self.logprobs)

    @property
    def grammar(self) -> Grammar | None:
        """What the answers are held to. Raises ApiError."""
        return None if self.response_format in IGNORED else response_grammar(self.response_format)

    def refuse_unsupported(self) -> None:
        self.grammar  # noqa: B018 - raises
        if self.suffix not in (None, False, ""):
            raise unsupported(
                "suffix", "suffix is not supported, because texts are continued at their end: leave it out."
            )
        if self.stream and (self.silent or self.prompt_logprobs):
            raise unsupported("stream", "An echo with logprobs, or with max_tokens 0, comes whole: leave out stream.")
