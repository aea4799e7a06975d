"""From a request to what the pipeline generates for it: the prompt in the model's format, its tokens, sampling
parameters.

This runs beside the event loop: long texts and schemas take time, which must not delay the tokens of other requests.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from msgspec import structs
from msgspec.structs import replace

from orchestrator.api.result import Result
from orchestrator.api.sampling import SamplingParams
from orchestrator.http.errors import ApiError, PromptTooLong, of_pipeline, unsupported, wrong
from orchestrator.http.openai.history import Note, template_messages
from orchestrator.http.openai.request import ChatRequest, CompletionRequest, ReasoningEos, sampling
from orchestrator.http.work import in_thread
from orchestrator.machine.grammar_check import require_enforceable
from orchestrator.text.answer.parsers import MarkedParser
from orchestrator.text.answer_format import AnswerFormat, AnswerParser, infer_answer_format
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.families.generic import NOTE
from orchestrator.text.families.harmony import HARMONY_EFFORTS
from orchestrator.text.families.qwen import JSON_CALLS
from orchestrator.text.plain_text import BREAK
from orchestrator.text.repairs import calls_as_text
from orchestrator.text.tokenizer import MOST_CHARACTERS, TextCodec
from protocol.common_prefix import common_prefix
from protocol.errors import InputError, PipelineError
from protocol.messages.client import PipelineState, ThoughtText
from protocol.messages.grammar import Grammar, Thought
from protocol.sampling.thought import closing_token, free_position

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking on and off."""

_LONG_RULES = 1 << 11
"""Characters of instructions and tools, below which it does not matter where they end."""
_RULES_KNOWN = 4
"""Different ones whose tokens are kept."""
_OPEN_THOUGHT = "The answer ended inside a thought. With reasoning_eos close, the thought ends and the answer follows."
_IMITATED = (
    "Messages hold texts that look like the model's control tokens. They are read as text, but where turns were joined "
    "or became text, only text separates them, which messages can imitate."
)
_CUT_JSON = "The JSON is incomplete, since the answer was cut off at its limit of tokens: give a larger one."


Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


@dataclass(frozen=True)
class PreparedRequest:
    """What is generated for a request, and how to read the answers."""

    prompts: Sequence[Prompt]
    """That of a chat has the breaks of `plain_text`."""
    new_parser: Callable[[], AnswerParser] = MarkedParser
    """Makes the parser of one choice."""
    shown: frozenset[int] = frozenset()
    """Special tokens whose text is part of the output."""
    marked: frozenset[int] = frozenset()
    """Tokens whose text in the output comes behind a mark: they begin a thought in the midst of an answer."""
    grammar: Grammar | None = None
    """What the answers are held to."""
    thought: ThoughtText | None = None
    """Where no stop string is looked for."""
    rules: str = ""
    """The beginning of the text that other conversations have too; empty if it is short or not known."""
    notes: Sequence[Note] = ()
    """What of the request was changed, has no effect, or is not read by the model."""
    open_thought: Thought | None = None
    """The thoughts in tokens that the answers may leave open."""
    closes: bool = False
    """An end in an open thought ends the thought instead."""
    tokens: Sequence[Sequence[int]] = ()
    """Of the prompts, once they are encoded."""

    @property
    def warnings(self) -> list[str]:
        """`notes` for the client, each once."""
        return [*dict.fromkeys(note.text for note in self.notes)]

    def if_cut(self, results: Sequence[Result]) -> list[str]:
        """What a client is told of results that were cut off, or ended inside a thought; empty if nothing."""
        cut = any(result.finish_reason == "length" for result in results)
        told = [_CUT_JSON] if cut and self.grammar is not None and self.grammar.schema else []
        return [*told, _OPEN_THOUGHT] if any(map(self._left_open, results)) else told

    def _left_open(self, result: Result) -> bool:
        ended = result.tokens and result.finish_reason == "stop" and result.stop is None
        if self.open_thought is None or not ended:
            return False
        return closing_token(self.open_thought, free_position(self.open_thought, result.tokens[:-1])) is not None


class ChatPrompts:
    """Renders the chats of one model."""

    def __init__(self, template: ChatTemplate, reasoning_eos: ReasoningEos = "keep") -> None:
        """`reasoning_eos`: of requests that do not say."""
        self._template = template
        self._reasoning_eos = reasoning_eos
        self.form: AnswerFormat = infer_answer_format(template)
        self._joins_results = template.mentions("tool_responses") and not template.mentions("== 'tool'")
        # Such a template joins texts.
        self._writes_arguments = template.mentions("['arguments'] +")

    def render(self, question: ChatRequest) -> PreparedRequest:
        """Raises ApiError for what the model's chat template can't render."""
        tools = question.offered
        grammar = question.grammar(self.form.call_writer or JSON_CALLS)
        if grammar is not None and grammar.calls is not None and self.form.call_writer is None:
            raise unsupported(
                "response_format" if grammar.schema else "tool_choice",
                "Calls in this model's format can't be enforced: set tool_choice to auto, and leave out strict and "
                "response_format.",
            )
        read = template_messages(
            question.messages,
            both=not self.form.harmony,
            joined=self._joins_results,
            written=self._writes_arguments,
        )
        # Behind the reading of arguments, whose JSON may have any character escaped.
        shown_tools = self._template.plain(tools)
        messages, generic = self._template.plain_messages(read), self.form.generic
        messages = self.form.with_described_tools(calls_as_text(messages) if generic else messages, shown_tools)
        passed = None if generic else shown_tools or None
        try:
            rendering = self._template.render(
                messages,
                passed,
                answering=question.add_generation_prompt is not False,
                continued=question.continues,
                **self._variables(question),
            )
        except PipelineError as error:
            raise of_pipeline(error) from error
        text = rendering.text
        sentences = [*rendering.repaired, *([NOTE] if generic and tools else ())]
        if rendering.repaired and BREAK in text:
            sentences.append(_IMITATED)
        # Calls end a thought, unless the grammar begins behind it.
        calls = bool(tools) and (grammar is None or grammar.optional)
        grammar = self._behind_thought(grammar, self.form.thought_before(text, calls=calls), question)
        # Without a thought in it, only a grammar of optional calls leaves room for one.
        room = grammar is None or grammar.optional or grammar.thought is not None
        opened = room and self.form.opens_thought(text)
        # A form that is enforced leaves no room for a thought; the marker can only be part of a value.
        marked = self.form.marked if grammar is None or grammar.optional or grammar.free else frozenset[int]()
        return PreparedRequest(
            [text],
            lambda: self.form.parser(opened, tools, question.most_calls, marks=bool(marked)),
            self.form.shown,
            marked,
            grammar,
            self.form.thought_text(opened) if room else None,
            self._rules(text, messages, passed, question),
            [
                *question.notes,
                *self._of_thinking(question),
                *(Note("template", each) for each in sentences),
                *_unread(rendering.left_out),
            ],
            self.form.open_thought(text, calls=calls) if room else None,
            (question.reasoning_eos or self._reasoning_eos) == "close",
        )

    def _rules(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        question: ChatRequest,
    ) -> str:
        if len(text) < _LONG_RULES:
            return ""
        rules = self._template.beginning(messages, tools, **self._variables(question))
        return rules if len(rules) >= _LONG_RULES and text.startswith(rules) else ""

    def _of_thinking(self, question: ChatRequest) -> list[Note]:
        """Notes that the request asks for thinking, or for none, without effect."""
        effort, switch = question.reasoning_effort, question.enable_thinking
        wanted = switch if switch is not None else None if effort is None else effort != "none"
        if not self.form.thinks:
            unsaid = "The model writes no thinking that can be told from its text, so the request for it has no effect."
            return [Note("field", unsaid)] if wanted or question.reasoning_eos == "close" else []
        if wanted is None or self._variables(question):
            return []
        return [
            Note("field", "The chat template has no switch for thinking, so the model thinks as it does by itself.")
        ]

    def _behind_thought(
        self, grammar: Grammar | None, thought: Thought | None, question: ChatRequest
    ) -> Grammar | None:
        """`grammar` with the thought that may come first, and the bound of that thought."""
        # In Harmony, a call does not come behind the thought but ends it.
        if thought is None or (self.form.harmony and question.offered):
            return grammar
        thought = replace(thought, budget=question.thinking_budget)
        if grammar is not None:
            return replace(grammar, thought=thought)
        return None if thought.budget is None else Grammar("", thought=replace(thought, again=not self.form.harmony))

    def _variables(self, question: ChatRequest) -> Mapping[str, Any]:
        """What the template is to know beside messages and tools."""
        known, effort = self._template.variables, question.reasoning_effort
        switch = question.enable_thinking
        if switch is None and effort is not None and (effort == "none" or "reasoning_effort" not in known):
            switch = effort != "none"
        variables: dict[str, Any] = {} if switch is None else {name: switch for name in _SWITCHES if name in known}
        if effort is not None and "reasoning_effort" in known:
            variables["reasoning_effort"] = HARMONY_EFFORTS.get(effort, effort) if self.form.harmony else effort
        return self._template.plain({**variables, **(question.chat_template_kwargs or {})})


def _unread(left_out: Sequence[str]) -> list[Note]:
    """`left_out`: roles of the messages whose content the template does not render."""
    return [
        Note(
            "unread",
            f"The model's chat template leaves out the content of {count} message(s) with the role {role!r}: "
            "the model does not read it.",
        )
        for role, count in Counter(left_out).items()
    ]


_SHORT_CHARACTERS = 1 << 16
"""Of all texts of a request; longer ones take turns."""

_USUAL_CHARACTERS = 4
"""Of a token."""


class PromptEncoder:
    """Encodes prompts in threads. Long texts take turns, because each takes up to 200 times its length in memory."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._turn = asyncio.Lock()

    async def encode(self, prompts: Sequence[Prompt], *, rendered: bool, context: int) -> list[Sequence[int]]:
        """`rendered`: of conversations. Raises ApiError for a text that is far too long for `context` tokens, and for
        one that the tokenizer can't read. Other texts may be too long as well."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            if len(text) > MOST_CHARACTERS * context:
                raise PromptTooLong(len(text) // _USUAL_CHARACTERS, context, "about ")
        try:
            async with self._turn if sum(map(len, texts)) > _SHORT_CHARACTERS else nullcontext():
                return await in_thread(self._encode, prompts, rendered)
        except InputError as error:
            raise of_pipeline(error) from error

    def _encode(self, prompts: Sequence[Prompt], rendered: bool) -> list[Sequence[int]]:
        encode = self._codec.encode_rendered if rendered else self._codec.encode
        return [encode(each) if isinstance(each, str) else each for each in prompts]


_COMPLETION_TOKENS = 16
"""Default of max_tokens in OpenAI's completions; a chat may fill the context."""


Choice: TypeAlias = tuple[Sequence[int], SamplingParams]
"""A prompt's tokens, and its sampling parameters."""
Asked: TypeAlias = ChatRequest | CompletionRequest


class Preparation:
    """For the requests of one model. All methods raise ApiError."""

    def __init__(self, codec: TextCodec, template: ChatTemplate, defaults: Mapping[str, Any]) -> None:
        """`defaults`: as of ServerSettings."""
        self._template = template
        self._encoder = PromptEncoder(codec)
        self._defaults = {name: value for name, value in defaults.items() if name != "reasoning_eos"}
        self._rules = lru_cache(maxsize=_RULES_KNOWN)(codec.encode_rendered)
        self.prompts = ChatPrompts(template, defaults.get("reasoning_eos", "keep"))

    async def ready(self, question: Asked, state: PipelineState) -> tuple[PreparedRequest, list[Choice]]:
        """All choices of a request."""
        prepared = await self.encoded(question, state.context)
        return prepared, await asyncio.to_thread(self._all_choices, question, prepared, state)

    async def encoded(self, question: Asked, context: int) -> PreparedRequest:
        """With the tokens of its prompts, also more than `context`."""
        if chat := isinstance(question, ChatRequest):
            prepared = await asyncio.to_thread(self.prompts.render, question)
        else:
            prepared = PreparedRequest(question.prompts, grammar=question.grammar, notes=question.notes)
        tokens = await self._encoder.encode(prepared.prompts, rendered=chat, context=context)
        return dataclasses.replace(prepared, tokens=tokens)

    def _all_choices(self, question: Asked, prepared: PreparedRequest, state: PipelineState) -> list[Choice]:
        _require_enforceable(question, prepared.grammar)
        if not prepared.prompts:
            raise ApiError(400, "There is no prompt: give at least one.", param="prompt")
        return [choice for tokens in prepared.tokens for choice in self._choices(question, prepared, tokens, state)]

    def _choices(
        self, question: Asked, prepared: PreparedRequest, tokens: Sequence[int], state: PipelineState
    ) -> list[Choice]:
        """Those of one prompt."""
        _require_fitting(tokens, state)
        default = None if isinstance(question, ChatRequest) else _COMPLETION_TOKENS
        room = state.context - len(tokens)
        params = sampling(question, room, default, self._defaults, prepared.grammar)
        params = structs.replace(
            params,
            shown=tuple(sorted(prepared.shown)),
            marked=tuple(prepared.marked),
            thought=prepared.thought,
            background=question.background,
            closed_thought=prepared.open_thought if prepared.closes else None,
            shared_prefix=common_prefix(tokens, self._rules(prepared.rules)) if prepared.rules else 0,
        )
        if isinstance(question, ChatRequest):
            params = structs.replace(params, stop=(*(params.stop or ()), *self._template.stops))
        # Equal seeds would give equal texts.
        seeds = (
            None if params.seed is None else (params.seed + index) % (1 << 32) for index in range(question.choices)
        )
        return [(tokens, structs.replace(params, seed=seed)) for seed in seeds]


def _require_enforceable(question: Asked, grammar: Grammar | None) -> None:
    try:
        require_enforceable(grammar)
    except InputError as error:
        param = "tools" if isinstance(question, ChatRequest) and question.offered else "response_format"
        raise wrong(param, str(error)) from error
    except PipelineError as error:
        raise of_pipeline(error) from error


def _require_fitting(tokens: Sequence[int], state: PipelineState) -> None:
    if not tokens:
        raise ApiError(400, "The prompt is empty: give at least one token to continue.", param="prompt")
    if max(tokens) >= state.vocabulary:
        raise ApiError(400, f"The prompt holds token {max(tokens)}: ids end at {state.vocabulary - 1}.", param="prompt")
    if len(tokens) >= state.context:
        raise PromptTooLong(len(tokens), state.context)
