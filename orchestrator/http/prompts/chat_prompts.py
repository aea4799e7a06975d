"""Chat requests as prompts in the format of one model, and the parsers of the answers to them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec.structs import replace

from orchestrator.http.errors import of_pipeline, unsupported
from orchestrator.http.openai.earlier_turns import template_messages
from orchestrator.http.openai.request_models import ChatRequest
from orchestrator.text.answer.answer_format import AnswerFormat, infer_answer_format
from orchestrator.text.answer.bound_calls.writers import JSON_CALLS
from orchestrator.text.answer.parts import AnswerParser
from orchestrator.text.answer.tool_description import with_described_tools
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import PipelineError
from protocol.messages.grammar import Grammar

log = structlog.get_logger()

_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking on and off."""
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Efforts that gpt-oss models do not know."""


@dataclass(frozen=True)
class RenderedChat:
    """A prompt, and how to read the answers to it."""

    text: str
    new_parser: Callable[[], AnswerParser]
    """Makes the parser of one choice."""
    shown: frozenset[int]
    """Special tokens whose text the parser needs."""
    marked: frozenset[int]
    """Tokens that begin a thought in the midst of an answer."""
    grammar: Grammar | None
    """What the answer is held to."""
    warnings: Sequence[str] = ()
    """What of the request the model does not read."""


class ChatPrompts:
    """Renders the chats of one model."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.form: AnswerFormat = infer_answer_format(template)
        self._joins_results = template.mentions("tool_responses") and not template.mentions("== 'tool'")
        # Such a template joins texts.
        self._writes_arguments = template.mentions("['arguments'] +")
        self._logged: set[str] = set()

    def render(self, question: ChatRequest) -> RenderedChat:
        """Raises ApiError for what the model's chat template can't render."""
        tools = question.offered
        if tools and not self.form.knows_tools:
            raise unsupported(
                "tools",
                "This model's chat template has no tool calls in a format that this server reads: leave tools out.",
            )
        grammar = question.grammar(self.form.call_writer or JSON_CALLS)
        if grammar is not None and grammar.calls is not None and self.form.call_writer is None:
            raise unsupported(
                "response_format" if grammar.schema else "tool_choice",
                "Calls in this model's format can't be enforced: set tool_choice to auto, and leave out strict and "
                "response_format.",
            )
        told: Sequence[Mapping[str, Any]] = question.messages
        if tools and not self._template.knows_tools and not self.form.harmony:
            told = with_described_tools(told, tools, block=self._template.mentions("```json"))
        messages = template_messages(
            told,
            both=not self.form.harmony,
            joined=self._joins_results,
            written=self._writes_arguments,
        )
        try:
            text, left_out = self._template.render(messages, tools or None, **self._variables(question))
        except PipelineError as error:
            raise of_pipeline(error) from error
        grammar = self._behind_thought(grammar, text, question)
        # Without a thought in it, only a grammar of optional calls leaves room for one.
        room = grammar is None or grammar.optional or grammar.thought is not None
        opened = room and self.form.opens_thought(text)
        return RenderedChat(
            text,
            lambda: self.form.parser(opened, tools, question.most_calls),
            self.form.shown,
            # A form that is enforced leaves no room for a thought; the marker can only be part of a value.
            self.form.marked if grammar is None or grammar.optional or grammar.free else frozenset(),
            grammar,
            self._warnings(left_out),
        )

    def _warnings(self, left_out: Sequence[str]) -> list[str]:
        """`left_out`: roles of the messages whose content the template does not render. The first is logged."""
        for role in {*left_out} - self._logged:
            log.warning("the chat template leaves out messages: the model does not read them", role=role)
        self._logged.update(left_out)
        return [
            f"The model's chat template leaves out the content of {count} message(s) with the role {role!r}: "
            "the model does not read it."
            for role, count in Counter(left_out).items()
        ]

    def _behind_thought(self, grammar: Grammar | None, text: str, question: ChatRequest) -> Grammar | None:
        """`grammar` with the thought that may come first, and the bound of that thought. `text`: the prompt."""
        thought, budget = self.form.thought_before(text), question.thinking_budget
        # In Harmony, a call does not come behind the thought but ends it.
        if thought is None or (self.form.harmony and question.offered):
            return grammar
        thought = replace(thought, budget=budget)
        if grammar is not None:
            return replace(grammar, thought=thought)
        return None if budget is None else Grammar("", thought=replace(thought, again=not self.form.harmony))

    def _variables(self, question: ChatRequest) -> Mapping[str, Any]:
        """What the template is to know beside messages and tools."""
        known, effort = self._template.variables, question.reasoning_effort
        switch = question.enable_thinking
        if switch is None and effort is not None and (effort == "none" or "reasoning_effort" not in known):
            switch = effort != "none"
        variables: dict[str, Any] = {} if switch is None else {name: switch for name in _SWITCHES if name in known}
        if effort is not None and "reasoning_effort" in known:
            variables["reasoning_effort"] = _HARMONY_EFFORTS.get(effort, effort) if self.form.harmony else effort
        return {**variables, **(question.chat_template_kwargs or {})}
