"""Where calls begin and end in an output that arrives in pieces, and which markers around them belong to them. Pure."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from orchestrator.text.answer.call_syntax import CallStream, CallSyntax, FoundCalls, ReadParts, Tools, Values
from orchestrator.text.answer.parts import Arguments, Call
from orchestrator.text.stop_scanner import StopScanner


class Border(Enum):
    """What a marker around calls or text stands for."""

    OPENING = "opening"
    """Calls follow."""
    CLOSING = "closing"
    """Behind calls."""
    WRAPPER = "wrapper"
    """Around the text."""


class Marker(NamedTuple):
    """A marker around calls or text, which may be dropped."""

    text: str
    border: Border


class CallText(NamedTuple):
    """Calls or pieces of them, and how they were written: empty if a call is not complete."""

    text: str
    calls: Sequence[Call | Arguments]


Piece: TypeAlias = str | Marker | CallText
"""Of an output. A string is any text."""
_MOST_RETRIES = 8
"""Calls of an answer that end at a marker which seemed to be in a value."""
_LINE_ENDS = 16
_LONGEST_HEAD = 1024
"""Characters in which the name of a call stands."""


class CallFinder:
    """Finds calls in an output, and the markers around them. The texts of all pieces together are the output.

    A call is malformed or incomplete if its function was not offered or it can't be read: then it is text, unless a
    piece of it was returned. A start marker in an inline code, or with something behind it that begins no call, is text
    too.
    """

    def __init__(
        self, syntax: CallSyntax | None, tools: Tools, wrappers: Sequence[str] = (), thought_end: str = ""
    ) -> None:
        """`wrappers`: markers around the text; `thought_end`: a marker that ends an unfinished call."""
        self._syntax = syntax
        self._tools = tools
        self._heads: list[str] = []
        opening = closing = end = start = ""
        if syntax is not None:
            (opening, closing), start, end = syntax.section or ("", ""), syntax.start, syntax.end
            self._heads = syntax.heads_of(tools)
        self._closing, self._thought_end, self._end = closing, thought_end, end
        self._in_call_markers = [start, end, closing, thought_end]
        # Models also write an end marker alone.
        stray = "" if end in start else end
        self._borders = dict.fromkeys(wrappers, Border.WRAPPER)
        self._borders |= {opening: Border.OPENING, closing: Border.CLOSING, stray: Border.CLOSING}
        self._text_markers = [start, *self._borders, thought_end]
        self._in_section = False
        self._in_call = False
        self._content = ""
        """Of the call at hand."""
        self._stream: CallStream | None = None
        self._streamed = 0
        """Characters of the call that `_stream` knows."""
        self._begun = False
        """Its name is known."""
        self._values = Values({})
        self._read = 0
        """Characters of the call that `_values` knows."""
        self._passed: list[int] = []
        """Where end markers begin in its values."""
        self._retries = 0
        self._line = ""
        """The beginning and the end of the line so far."""
        self._fenced = False
        """In a block of code."""
        self._scanner = StopScanner(self._text_markers)

    @property
    def inside(self) -> bool:
        """Whether a call was begun that will have an end marker."""
        return bool(self._end) and (self._in_call or self._in_section)

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before, crossed = self._scanner.push(text)
            found, text = (self._scanner.found or "", self._scanner.rest) if crossed else ("", "")
            if self._in_call:
                self._content += before
                if not self._may_begin():
                    text = self._content + (found or self._scanner.flush()) + text
                    pieces.append(self._text(self._leave()))
                    continue
                # What is behind an end marker in a value may turn out to be behind the call.
                pieces += self._written(self._passed[0] if self._passed else len(self._content))
            elif before:
                pieces.append(self._text(before))
            if not found:
                return pieces
            pieces += self._cross_in_call(found) if self._in_call else self._cross(found)
            self._scanner = StopScanner(self._in_call_markers if self._in_call else self._text_markers)

    def finish(self) -> list[Piece]:
        """The pieces that were held back. What is pushed later is no part of them."""
        held = self._scanner.flush()
        self._in_section = False
        if not self._in_call:
            return [self._text(held)] if held else []
        self._content += held
        if self._passed and (self._syntax is None or not self._syntax.read_cut(self._content, self._tools)):
            return [*self._retried(), *self.finish()]
        return self._unended()

    def _may_begin(self) -> bool:
        """Whether the content so far can be the beginning of a call."""
        if not self._begun:
            said = "".join(self._content[:_LONGEST_HEAD].split())
            self._begun = any(said.startswith(head) for head in self._heads)
            return self._begun or any(head.startswith(said) for head in self._heads)
        return True

    def _cross(self, marker: str) -> list[Piece]:
        """Go behind a marker outside calls."""
        if self._syntax is not None and marker == self._syntax.start and self._may_start(self._syntax):
            self._in_call, self._content, self._begun, self._read = True, "", False, 0
            self._values, self._passed = Values(self._syntax.quotes), []
            self._stream, self._streamed = CallStream(self._syntax, self._tools), 0
            return []
        self._text(marker)
        if marker == self._thought_end:
            self._line, self._fenced = "", False
        border = self._borders.get(marker)
        if border is None:
            return [marker]
        if border is not Border.WRAPPER:
            self._in_section = border is Border.OPENING
        return [Marker(marker, border)]

    def _cross_in_call(self, marker: str) -> list[Piece]:
        place = len(self._content)
        in_value = self._values.push(self._content[self._read :])
        self._read = place
        if in_value:
            # Where all calls end too, this one has ended, in a value without an end.
            if (
                marker == self._closing
                and self._passed
                and not self._content[self._passed[-1] + len(self._end) :].strip()
            ):
                self._passed = self._passed[-1:]
                return [*self._retried(), *self._cross(marker)]
            self._content += marker
            self._passed += [place] if marker == self._end else []
            return []
        if marker == self._end:
            return self._ended()
        return [*self._unended(), *self._cross(marker)]

    def _may_start(self, syntax: CallSyntax) -> bool:
        """A call is in no inline code. Calls that have tags begin a line or a section, outside a block of code."""
        if self._line.endswith("`"):
            return False
        return not syntax.tagged or self._in_section or not (self._line.strip() or self._fenced)

    def _written(self, end: int) -> list[Piece]:
        """The pieces of the call at hand that are certain by its first `end` characters."""
        assert self._stream is not None
        parts = self._stream.push(self._content[self._streamed : end])
        self._streamed = end
        return [CallText("", parts)] if parts else []

    def _ended(self) -> list[Piece]:
        """The call at hand, with its end marker."""
        pieces, found, text = self._finished(marked=True)
        if found is None:
            return [self._text(text + self._end)]
        if not found.rest:
            return [*pieces, self._call(text + self._end, found)]
        call = self._call(text.removesuffix(found.rest), found)
        return [*pieces, call, self._text(found.rest), *self._cross(self._end)]

    def _unended(self) -> list[Piece]:
        """The call at hand, without an end marker."""
        pieces, found, text = self._finished(marked=False)
        if found is None:
            return [self._text(text)]
        call = self._call(text.removesuffix(found.rest), found)
        return [*pieces, call, *([self._text(found.rest)] if found.rest else [])]

    def _finished(self, *, marked: bool) -> tuple[list[Piece], ReadParts | FoundCalls | None, str]:
        """The last pieces of the call at hand, None if it is none, and its text."""
        pieces = self._written(len(self._content))
        assert self._stream is not None
        found = self._stream.finish(marked=marked)
        return pieces, found, self._leave() + self._content

    def _retried(self) -> list[Piece]:
        """The call at hand up to the first end marker that seemed to be in a value, and what follows."""
        self._retries += 1
        if self._retries > _MOST_RETRIES:
            return self._unended()
        place, content = self._passed[0], self._content
        self._content = content[:place]
        return [*self._ended(), *self.push(content[place + len(self._end) :])]

    def _call(self, text: str, found: ReadParts | FoundCalls) -> CallText:
        self._line = ""
        return CallText(text, found.calls)

    def _leave(self) -> str:
        """Forget the call at hand; its start marker."""
        self._in_call, self._scanner = False, StopScanner(self._text_markers)
        return self._in_call_markers[0]

    def _text(self, text: str) -> str:
        """`text`, whose lines are looked at."""
        *lines, last = (self._line + text).split("\n")
        self._fenced ^= bool(sum(line.lstrip().startswith("```") for line in lines) % 2)
        self._line = last[:_LINE_ENDS] + last[_LINE_ENDS:][-_LINE_ENDS:]
        return text
