"""How one model writes its answers: the format of its reasoning and of its tool calls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.text.answer.bound_calls.writers import CallWriter, HarmonyCalls, call_writer
from orchestrator.text.answer.harmony import (
    HARMONY_ANSWER,
    HARMONY_CLOSING,
    HARMONY_TOKENS,
    HarmonyParser,
    writes_harmony,
)
from orchestrator.text.answer.parsers import MARKERS, ThoughtMarkers, ThoughtParser, ToolCallParser, WrapperParser
from orchestrator.text.answer.parts import AnswerParser, Part, Spoken, ThoughtSpan
from orchestrator.text.answer.tool_syntax import Tools, ToolSyntax, infer_tool_syntax
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import MARK, TextCodec
from protocol.messages.client import ThoughtText
from protocol.messages.grammar import Thought

_CUT_AT = re.compile(
    r"""split\(\s*(['"])</(?P<name>[\w:.-]{0,40}(?:think|thought|reason|reflect)[\w:.-]{0,40})>\1""", re.IGNORECASE
)


@dataclass(frozen=True)
class AnswerFormat:
    """What a model's answers look like. Without any of these, an answer is text alone."""

    thought: ThoughtMarkers | None = None
    tools: ToolSyntax | None = None
    harmony: bool = False
    shown: frozenset[int] = frozenset()
    """Special tokens whose text the parsers need."""
    marked: frozenset[int] = frozenset()
    """The tokens that begin a thought, or a start marker of several tokens. In the midst of an answer, they alone tell
    a thought from a text about markers."""
    bounds: Thought | None = None
    """The thought in tokens, by which a grammar tells it from the answer; None if its markers are no tokens, or the
    template has none."""
    call_writer: CallWriter | None = None
    """Makes grammars of calls; None if they can't be held to the schemas of their functions while decoding."""

    @property
    def knows_tools(self) -> bool:
        return self.harmony or self.tools is not None

    @property
    def thinks(self) -> bool:
        """Whether the model may write reasoning that can be told from its answer."""
        return self.harmony or self.thought is not None

    def opens_thought(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins inside a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.start)

    def closes_thought(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins behind a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.end)

    def thought_before(self, prompt: str) -> Thought | None:
        """The thought in tokens that an answer to this rendered prompt may or must begin with; None if it can't."""
        bounds = self.bounds
        if bounds is None or self.closes_thought(prompt):
            return None
        starts = bounds.starts[:1] if prompt.endswith("\n") else bounds.starts
        return replace(bounds, starts=starts, opened=bounds.opened or self.opens_thought(prompt))

    def thought_text(self, opened: bool) -> ThoughtText | None:
        """The thought in the output's text; None if the model writes none. `opened`: as `opens_thought` has it."""
        if self.harmony:
            return ThoughtText("", "".join(HARMONY_ANSWER), opened=True)
        return None if self.thought is None else ThoughtText(self.thought.start, self.thought.end, opened)

    def parser(self, opened: bool, tools: Tools, most_calls: int | None, *, marks: bool = True) -> AnswerParser:
        """`opened`: as `opens_thought` has it; `tools`: those that the request offers; `marks`: the output has them
        before `marked` tokens."""
        if self.harmony:
            return HarmonyParser(bool(tools), most_calls)
        thought = ThoughtParser(self.thought, opened) if self.thought else None
        calls = ToolCallParser(self.tools, tools, most_calls) if self.tools and tools else None
        dropped = self.thought.wrappers if self.thought else ()
        return MarkedParser(thought, calls, WrapperParser(dropped) if dropped else None, marks)


_PIECES = re.compile(rf"[^{MARK}]+|{MARK}{MARK}|{MARK}")
"""Texts, marks that are text, and marks."""


class MarkedParser:
    """Thoughts, if the model writes any, text and calls.

    A thought comes first, or at a `MARK`, but not inside a call. Two `MARK`s are one that is text.
    """

    def __init__(
        self,
        thought: ThoughtParser | None = None,
        calls: ToolCallParser | None = None,
        wrappers: WrapperParser | None = None,
        marks: bool = True,
    ) -> None:
        """`marks`: without them, a `MARK` is text."""
        self._marks = marks
        self._thought = thought
        self._calls = calls
        self._wrappers = wrappers
        self._held = ""
        """A `MARK` at the end of the text so far: a second one may follow."""

    @property
    def thoughts(self) -> Sequence[ThoughtSpan]:
        return () if self._thought is None else self._thought.thoughts

    def push(self, text: str) -> Sequence[Part]:
        if self._thought is None:
            return self._parsed([Spoken(text)])
        if not self._marks:
            return self._parsed(self._thought.push(text))
        text = self._held + text
        self._held = MARK if (len(text) - len(text.rstrip(MARK))) % 2 else ""
        parts: list[Part] = []
        for piece in _PIECES.findall(text.removesuffix(self._held)):
            if piece == MARK:
                parts += self._mark(self._thought)
                continue
            if piece == 2 * MARK:
                self._thought.pass_over(1)
                piece = MARK
            parts += self._parsed(self._thought.push(piece))
        return parts

    def finish(self) -> Sequence[Part]:
        return [*self._parsed(self._thought.finish() if self._thought else ()), *self._rest()]

    def _mark(self, thought: ThoughtParser) -> list[Part]:
        may_open = self._calls is None or not self._calls.inside
        parts = self._rest() if may_open and thought.answering else []
        thought.mark(may_open=may_open)
        return parts

    def _rest(self) -> list[Part]:
        """What is held back of the text."""
        parts = [] if self._wrappers is None else [*self._with_calls(self._wrappers.finish())]
        return parts if self._calls is None else [*parts, *self._calls.finish()]

    def _parsed(self, parts: Sequence[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Spoken):
                found += self._with_calls(self._wrappers.push(part.text) if self._wrappers else part.text)
            else:
                found.append(part)
        return found

    def _with_calls(self, text: str) -> Sequence[Part]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Spoken(text)] if text else []


def infer_answer_format(template: ChatTemplate) -> AnswerFormat:
    """The format of a model's answers, from its chat template and its vocabulary."""
    codec = template.codec
    if writes_harmony(template):
        head, closing = (_tokens("".join(marker), codec) for marker in (HARMONY_ANSWER, HARMONY_CLOSING))
        bounds = Thought((head,), head, opened=True, closing=closing)
        shown = codec.hidden(HARMONY_TOKENS)
        return AnswerFormat(harmony=True, shown=shown, bounds=bounds, call_writer=HarmonyCalls(codec))
    thought = next((markers for markers in MARKERS if _writes(markers, template, codec)), None) or _declared(template)
    tools = infer_tool_syntax(template)
    marks = [*(thought.tokens if thought else ()), *(tools.tokens if tools else ())]
    bounds = None if thought is None else _bounds(thought, template)
    return AnswerFormat(
        thought,
        tools,
        shown=codec.hidden(marks),
        marked=_marked(thought, codec),
        bounds=bounds,
        call_writer=None if tools is None else call_writer(tools, template),
    )


def _marked(markers: ThoughtMarkers | None, codec: TextCodec) -> frozenset[int]:
    if markers is None or not _in_vocabulary(markers, codec):
        return frozenset()
    token = codec.id_of(markers.tokens[0])
    return frozenset() if token is None else frozenset([token])


def _bounds(markers: ThoughtMarkers, template: ChatTemplate) -> Thought | None:
    """None for a model that has the markers' tokens and a template without thoughts: such a model does not think."""
    codec = template.codec
    mentioned = template.mentions(markers.start) or template.mentions(markers.end)
    if not mentioned or not _in_vocabulary(markers, codec):
        return None
    # GLM models begin with a line break. In a template's source, the break is an escape.
    broken = ("\n",) if template.mentions("\\n" + markers.start) or template.mentions("\n" + markers.start) else ()
    starts = tuple(_tokens(space + markers.start, codec) for space in ("", *broken))
    return Thought(starts, _tokens(markers.end, codec))


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
