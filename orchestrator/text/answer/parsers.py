"""Reads an output piece by piece: thoughts, text, tool calls. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.text.answer.call_syntax import CallSyntax, FoundCalls, Tools
from orchestrator.text.answer.parts import Call, Part, Reasoning, Spoken, ThoughtSpan
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


class ToolCallParser:
    """Splits a text into calls and the text around them. A malformed or incomplete call is text.

    Markers around a section of calls are dropped, unless no call is in it.
    """

    def __init__(self, syntax: CallSyntax, tools: Tools, most: int | None) -> None:
        """`most`: number of calls that the client accepts, further ones are dropped; None for any number."""
        self._syntax = syntax
        self._tools = tools
        self._most = most
        self._found = 0
        self._section_start, self._section_end = syntax.section or ("", "")
        self._in_section = False
        self._in_call = False
        """Behind a start marker."""
        self._content = ""
        """Of the call so far, or what may be dropped: white space behind a call, or a section's start."""
        self._before = ""
        """What is dropped before the call if that is complete."""
        self._behind_call = False
        """Nothing but white space since the last call: it is dropped unless text follows."""
        self._scanner = StopScanner(self._markers)

    @property
    def inside(self) -> bool:
        """Whether a call was begun that will have an end marker."""
        return (self._in_call or self._in_section) and bool(self._syntax.end)

    def push(self, text: str) -> Sequence[Spoken | Call]:
        parts: list[Spoken | Call] = []
        while True:
            before, found = self._scanner.push(text)
            self._content += before
            if not found:
                return parts if self._in_call else [*parts, *self._spoken()]
            parts += self._cross(self._scanner.found)
            text = self._scanner.rest
            self._scanner = StopScanner(self._markers)

    def finish(self) -> Sequence[Spoken | Call]:
        """The parts that were held back. What is pushed later is no part of them."""
        self._content += self._scanner.flush()
        in_call, self._in_call, self._in_section = self._in_call, False, False
        self._scanner = StopScanner(self._markers)
        if not in_call:
            return self._spoken()
        return self._call(self._syntax.read_cut(self._content, self._tools), "")

    @property
    def _markers(self) -> Sequence[str]:
        if self._in_call:
            return [self._syntax.end or self._syntax.start]
        return [self._syntax.start, self._section_end if self._in_section else self._section_start]

    def _cross(self, marker: str | None) -> list[Spoken | Call]:
        """Go behind a marker. Without an end marker, the next start marker ends a call and begins one."""
        if self._in_call:
            self._in_call = not self._syntax.end
            return self._call(self._syntax.read(self._content, self._tools), self._syntax.end)
        if self._in_section and marker == self._section_end:
            self._in_section = False
            if not self._behind_call or self._content.strip():
                self._content += self._section_end
            return self._spoken()
        parts = self._spoken()
        if marker == self._syntax.start:
            self._in_call = True
            self._before, self._content = "" if self._behind_call else self._content, ""
        else:
            self._in_section, self._behind_call = True, False
            self._content = self._section_start
        return parts

    def _spoken(self) -> list[Spoken | Call]:
        """The text so far, unless a call may follow before which it is dropped."""
        begun = self._in_section and not self._content.removeprefix(self._section_start).strip()
        if begun or (self._behind_call and not self._content.strip()):
            return []
        self._behind_call = False
        return self._text()

    def _call(self, found: FoundCalls | None, end: str) -> list[Spoken | Call]:
        before, self._before = self._before, ""
        if found is None:
            self._content = before + self._syntax.start + self._content + end
            self._behind_call = False
            return self._text()
        calls = found.calls
        self._content = found.rest if found.rest.strip() else ""
        self._behind_call = True
        kept = calls if self._most is None else calls[: max(0, self._most - self._found)]
        self._found += len(calls)
        return [*kept, *self._spoken()]

    def _text(self) -> list[Spoken | Call]:
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
