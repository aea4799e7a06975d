"""Reads an output piece by piece: thoughts, text, tool calls. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from orchestrator.text.answer.call_syntax import CallLimit, CallStream, CallSyntax, Tools
from orchestrator.text.answer.parts import Arguments, Call, Part, Reasoning, Spoken, ThoughtSpan
from orchestrator.text.stop_scanner import Place, StopScanner, ThoughtScanner
from orchestrator.text.tokenizer import MARK


class ThoughtMarkers(NamedTuple):
    """The texts around a thought."""

    start: str
    end: str
    parts: tuple[str, ...] = ()
    """The tokens in the markers, where a marker is more than one token."""
    wrappers: tuple[str, ...] = ()
    """Markers around the text, which are dropped."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens by which a vocabulary shows that its model writes these markers."""
        return self.parts or (self.start, self.end)


class WrapperParser:
    """Drops markers from a text."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._scanner = StopScanner(markers)

    def push(self, text: str) -> str:
        """The text that is certain now."""
        kept: list[str] = []
        while True:
            before, found = self._scanner.push(text)
            kept.append(before)
            if not found:
                return "".join(kept)
            text = self._scanner.rest

    def finish(self) -> str:
        """The text that was held back."""
        return self._scanner.flush()


class ThoughtParser:
    """Splits an answer into its thoughts and its text. Inside the text, only `mark` tells a marker from text.

    White space at both ends of a thought is dropped, and white space between the thought and the text, unless it alone
    parts the text from what was said before.
    """

    def __init__(self, markers: ThoughtMarkers, opened: bool) -> None:
        """`opened`: the prompt ends with the start marker, so the answer begins inside the thought."""
        self._scanner = ThoughtScanner(markers.start, markers.end, opened)
        self._held = ""
        """White space in the thought, which waits for what follows."""
        self._fresh = True
        """Nothing of the thought was returned yet."""
        self._gap = False
        """Nothing but white space since the thought: it is dropped."""
        self._seen = 0
        """Characters of the output whose place is certain."""
        self._last = ""
        """The last character of the text so far."""
        self.thoughts = [ThoughtSpan(0)]
        self._begun = False
        """The last one of them is one, and not only a place where one may begin."""

    @property
    def answering(self) -> bool:
        return self._scanner.place is Place.ANSWER

    def mark(self, *, may_open: bool) -> None:
        """The output has a mark here: what follows is a token of its own. It begins a thought if it is the start
        marker, unless a thought is open."""
        if may_open and self.answering:
            self._scanner.reopen()
            self._fresh, self._gap, self._begun = True, False, False
            self.thoughts.append(ThoughtSpan(self._seen))
        self.pass_over(1)

    def pass_over(self, characters: int) -> None:
        """So many characters of the output are not pushed."""
        self._seen += characters

    def push(self, text: str) -> list[Reasoning | Spoken]:
        parts: list[Reasoning | Spoken] = []
        for place, piece in self._scanner.push(text):
            self._seen += len(piece)
            match place:
                case Place.BEFORE:
                    self._begun = True
                case Place.THOUGHT:
                    parts += self._thought(piece)
                case Place.END:
                    self._held = ""
                    self._gap = not self._last or self._last.isspace()
                    self.thoughts[-1] = ThoughtSpan(self.thoughts[-1].begin, self._seen)
                case Place.ANSWER:
                    parts += self._answer(piece)
        return parts

    def finish(self) -> list[Reasoning | Spoken]:
        place, text = self._scanner.flush()
        if place is Place.THOUGHT:
            text = (self._held + text).rstrip()
            return _reasoning(text.lstrip() if self._fresh else text)
        return [Spoken(text)] if text else []

    def _thought(self, text: str) -> list[Reasoning | Spoken]:
        text = self._held + text
        if self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._fresh = self._fresh and not kept
        return _reasoning(kept)

    def _answer(self, text: str) -> list[Reasoning | Spoken]:
        if not self._begun:
            self.thoughts.pop()
            self._begun = True
        if self._gap:
            text = text.lstrip()
            self._gap = not text
        if not text:
            return []
        self._last = text[-1]
        return [Spoken(text)]


def _reasoning(text: str) -> list[Reasoning | Spoken]:
    return [Reasoning(text)] if text else []


TextPart: TypeAlias = Spoken | Call | Arguments


class ToolCallParser:
    """Splits a text into calls and the text around them. A malformed or incomplete call is text, unless it was begun.

    Markers around a section of calls are dropped, unless no call is in it.
    """

    def __init__(self, syntax: CallSyntax, tools: Tools, most: int | None) -> None:
        """`most`: number of calls that the client accepts, further ones are dropped; None for any number."""
        self._syntax = syntax
        self._tools = tools
        self._kept = CallLimit(most).kept
        self._section_start, self._section_end = syntax.section or ("", "")
        self._in_section = False
        self._stream: CallStream | None = None
        """Behind a start marker."""
        self._content = ""
        """What may be dropped: white space behind a call, or a section's start."""
        self._before = ""
        """What is dropped before the call if that is complete."""
        self._behind_call = False
        """Nothing but white space since the last call: it is dropped unless text follows."""
        self._scanner = StopScanner(self._markers)

    @property
    def inside(self) -> bool:
        """Whether a call was begun that will have an end marker."""
        return (self._stream is not None or self._in_section) and bool(self._syntax.end)

    def push(self, text: str) -> Sequence[TextPart]:
        parts: list[TextPart] = []
        while True:
            before, found = self._scanner.push(text)
            if self._stream is None:
                self._content += before
            else:
                parts += self._kept(self._stream.push(before))
            if not found:
                return parts if self._stream is not None else [*parts, *self._spoken()]
            parts += self._cross(self._scanner.found)
            text = self._scanner.rest
            self._scanner = StopScanner(self._markers)

    def finish(self) -> Sequence[TextPart]:
        """The parts that were held back. What is pushed later is no part of them."""
        held, self._scanner, self._in_section = self._scanner.flush(), StopScanner(self._markers), False
        if self._stream is None:
            self._content += held
            return self._spoken()
        parts = [*self._kept(self._stream.push(held)), *self._call(self._stream, "", marked=False)]
        self._stream, self._scanner = None, StopScanner(self._markers)
        return parts

    @property
    def _markers(self) -> Sequence[str]:
        if self._stream is not None:
            return [self._syntax.end or self._syntax.start]
        return [self._syntax.start, self._section_end if self._in_section else self._section_start]

    def _cross(self, marker: str | None) -> list[TextPart]:
        """Go behind a marker. Without an end marker, the next start marker ends a call and begins one."""
        if self._stream is not None:
            stream = self._stream
            self._stream = None if self._syntax.end else CallStream(self._syntax, self._tools)
            return self._call(stream, self._syntax.end, marked=True)
        if self._in_section and marker == self._section_end:
            self._in_section = False
            if not self._behind_call or self._content.strip():
                self._content += self._section_end
            return self._spoken()
        parts = self._spoken()
        if marker == self._syntax.start:
            self._stream = CallStream(self._syntax, self._tools)
            self._before, self._content = "" if self._behind_call else self._content, ""
        else:
            self._in_section, self._behind_call = True, False
            self._content = self._section_start
        return parts

    def _spoken(self) -> list[TextPart]:
        """The text so far, unless a call may follow before which it is dropped."""
        begun = self._in_section and not self._content.removeprefix(self._section_start).strip()
        if begun or (self._behind_call and not self._content.strip()):
            return []
        self._behind_call = False
        return self._text()

    def _call(self, stream: CallStream, end: str, *, marked: bool) -> list[TextPart]:
        found = stream.finish(marked=marked)
        before, self._before = self._before, ""
        if found is None:
            self._content = before + self._syntax.start + stream.content + end
            self._behind_call = False
            return self._text()
        self._content = found.rest if found.rest.strip() else ""
        self._behind_call = True
        return [*self._kept(found.calls), *self._spoken()]

    def _text(self) -> list[TextPart]:
        text, self._content = self._content, ""
        return [Spoken(text)] if text else []


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
