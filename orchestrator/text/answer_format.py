"""How one model writes its answers: the format of its reasoning and of its tool calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from msgspec.structs import replace

from orchestrator.text.answer.bound_calls import StyledCalls
from orchestrator.text.answer.call_finder import CallFinder
from orchestrator.text.answer.call_syntax import CallSyntax, Tools
from orchestrator.text.answer.parsers import MarkedParser, ThoughtMarkers, ThoughtParser
from orchestrator.text.chat_template import ChatMessage, ChatTemplate
from orchestrator.text.families import SYNTAXES, THOUGHTS
from orchestrator.text.families.generic import GENERIC
from orchestrator.text.families.harmony import (
    HARMONY_ANSWER,
    HARMONY_CLOSING,
    HARMONY_THOUGHT,
    HARMONY_TOKENS,
    HarmonyCalls,
    HarmonyParser,
    writes_harmony,
)
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.client import ThoughtText
from protocol.messages.grammar import Thought

CallWriter: TypeAlias = StyledCalls | HarmonyCalls
AnswerParser: TypeAlias = MarkedParser | HarmonyParser
"""Parses one answer: `push` returns the parts that are certain, `finish` those that were held back. The borders between
the pieces of its text do not change the parts."""
_CUT_AT = re.compile(
    r"""split\(\s*(['"])</(?P<name>[\w:.-]{0,40}(?:think|thought|reason|reflect)[\w:.-]{0,40})>\1""", re.IGNORECASE
)


@dataclass(frozen=True)
class AnswerFormat:
    """What a model's answers look like. Without any of these, an answer is text alone."""

    thought: ThoughtMarkers | None = None
    tools: CallSyntax | None = None
    harmony: bool = False
    shown: frozenset[int] = frozenset()
    """Special tokens whose text the parsers need."""
    marked: frozenset[int] = frozenset()
    """The tokens that begin a thought, or a start marker of several tokens. In the midst of an answer, they alone tell
    a thought from a text about markers."""
    bounds: Thought | None = None
    """The thought in tokens, by which a grammar tells it from the answer; None if its markers are no tokens, or the
    template has none."""
    analysis: Thought | None = None
    """In Harmony, one message of a thought. `bounds` go up to the answer."""
    call_writer: CallWriter | None = None
    """Makes grammars of calls; None if they can't be held to the schemas of their functions while decoding."""
    description: Callable[[Tools], str] | None = None
    """Describes tools to a model whose template does not."""

    @property
    def generic(self) -> bool:
        """Whether the template reads neither tools nor calls, or in a syntax that is not known here."""
        return self.tools is GENERIC

    @property
    def thinks(self) -> bool:
        """Whether the model may write reasoning that can be told from its answer."""
        return self.harmony or self.thought is not None

    def opens_thought(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins inside a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.start)

    def thought_before(self, prompt: str, *, calls: bool) -> Thought | None:
        """The thought in tokens that an answer to this rendered prompt may or must begin with; None if it can't.
        `calls`: they may end it."""
        bounds, closed = self.bounds, self.thought is not None and prompt.rstrip().endswith(self.thought.end)
        if bounds is None or closed:
            return None
        starts = bounds.starts[:1] if prompt.endswith("\n") else bounds.starts
        opened = bounds.opened or self.opens_thought(prompt)
        return replace(bounds, starts=starts, opened=opened, calls=bounds.calls if calls else ())

    def open_thought(self, prompt: str, *, calls: bool) -> Thought | None:
        """The thoughts in tokens that may be open in an answer to this rendered prompt."""
        thought = self.analysis or self.thought_before(prompt, calls=calls)
        return None if thought is None else replace(thought, again=True)

    def thought_text(self, opened: bool) -> ThoughtText | None:
        """The thought in the output's text; None if the model writes none. `opened`: as `opens_thought` has it."""
        if self.harmony:
            return ThoughtText("", HARMONY_ANSWER, opened=True)
        return None if self.thought is None else ThoughtText(self.thought.start, self.thought.end, opened)

    def with_described_tools(self, messages: Sequence[ChatMessage], tools: Tools) -> Sequence[ChatMessage]:
        """`messages` with the tools at the end of the first system message, unless the template renders tools."""
        if self.description is None or not tools:
            return messages
        before = messages[:1] if messages[0].get("role") == "system" else []
        texts = [*(each["content"] for each in before), self.description(tools)]
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *messages[len(before) :]]

    def parser(self, opened: bool, tools: Tools, most_calls: int | None, *, marks: bool = True) -> AnswerParser:
        """`opened`: as `opens_thought` has it; `tools`: those that the request offers; `marks`: the output has them
        before `marked` tokens."""
        if self.harmony:
            return HarmonyParser(tools, most_calls)
        thought = ThoughtParser(self.thought, opened) if self.thought else None
        wrappers, end = (self.thought.wrappers, self.thought.end) if self.thought else ((), "")
        return MarkedParser(thought, CallFinder(self.tools if tools else None, tools, wrappers, end), most_calls, marks)


def infer_answer_format(template: ChatTemplate) -> AnswerFormat:
    """The format of a model's answers, from its chat template and its vocabulary."""
    codec = template.codec
    if writes_harmony(template):
        head, closing = _tokens(HARMONY_ANSWER, codec), _tokens(HARMONY_CLOSING, codec)
        bounds = Thought((head,), head, opened=True, closing=closing)
        start, end = (_tokens(mark, codec) for mark in HARMONY_THOUGHT)
        inside = Thought((start,), end)
        shown = codec.hidden(HARMONY_TOKENS)
        return AnswerFormat(harmony=True, shown=shown, bounds=bounds, analysis=inside, call_writer=HarmonyCalls(codec))
    thought = next((markers for markers in THOUGHTS if _writes(markers, template, codec)), None) or _declared(template)
    tools = infer_tool_syntax(template)
    marks = [*(thought.tokens if thought else ()), *tools.tokens]
    first = codec.id_of(thought.tokens[0]) if thought and _in_vocabulary(thought, codec) else None
    return AnswerFormat(
        thought,
        tools,
        shown=codec.hidden(marks),
        marked=frozenset(() if first is None else (first,)),
        bounds=None if thought is None else _bounds(thought, tools, template),
        call_writer=tools.writer(template),
        description=tools.describer(template),
    )


def teaches_tools(template: ChatTemplate) -> bool:
    """Whether the model was trained on tools, as far as its template says."""
    return template.knows_tools or infer_tool_syntax(template) is not GENERIC


def infer_tool_syntax(template: ChatTemplate) -> CallSyntax:
    """The syntax that the model's template teaches; GENERIC if it knows no tools, or no syntax that is known here."""
    shown = [syntax for syntax in SYNTAXES if syntax.shown_by(template)]
    if not template.knows_tools and not any(syntax.description for syntax in shown):
        return GENERIC
    named = [syntax for syntax in SYNTAXES if template.tool_parser in (syntax.settings_names or (syntax.name,))]
    others = (syntax for syntax in SYNTAXES if syntax.fallback_sign is not None and syntax.fallback_sign(template))
    return next(chain(named, shown, others), GENERIC)


def _bounds(markers: ThoughtMarkers, tools: CallSyntax, template: ChatTemplate) -> Thought | None:
    """None for a model that has the markers' tokens and a template without thoughts: such a model does not think."""
    codec = template.codec
    mentioned = template.mentions(markers.start) or template.mentions(markers.end)
    if not mentioned or not _in_vocabulary(markers, codec):
        return None
    # GLM models begin with a line break. In a template's source, the break is an escape.
    broken = ("\n",) if template.mentions("\\n" + markers.start) or template.mentions("\n" + markers.start) else ()
    starts = tuple(_tokens(space + markers.start, codec) for space in ("", *broken))
    begun = (*(tools.section or ())[:1], tools.start)
    calls = tuple(token for mark in begun if (token := codec.id_of(mark)) is not None)
    return Thought(starts, _tokens(markers.end, codec), calls=calls)


def _writes(markers: ThoughtMarkers, template: ChatTemplate, codec: TextCodec) -> bool:
    """As mlx-lm infers it from the vocabulary; a template may also name markers that are no tokens."""
    mentioned = template.mentions(markers.start) and template.mentions(markers.end)
    return template.own and (mentioned or _in_vocabulary(markers, codec))


def _declared(template: ChatTemplate) -> ThoughtMarkers | None:
    """Markers by which the template takes the thoughts out of earlier answers."""
    found = template.search(_CUT_AT)
    markers = ThoughtMarkers(f"<{found['name']}>", f"</{found['name']}>") if found else None
    return markers if markers and template.mentions(markers.start) else None


def _in_vocabulary(markers: ThoughtMarkers, codec: TextCodec) -> bool:
    return all(codec.id_of(token) is not None for token in markers.tokens)


def _tokens(text: str, codec: TextCodec) -> tuple[int, ...]:
    token = codec.id_of(text)
    return tuple(codec.encode(text, special=False)) if token is None else (token,)
