"""Where calls begin and end in an output that arrives in pieces, and which markers around them belong to them. Pure."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from orchestrator.text.answer.call_syntax import LONGEST_HEAD, CallStream, CallSyntax, Tools, Values, beginning_of_calls
from orchestrator.text.answer.parts import Arguments, Call
from orchestrator.text.stop_scanner import StopScanner


class Marker(NamedTuple):
    """A marker that may be dropped: before calls, behind calls, or around the text."""

    text: str
    place: Literal["opening", "closing", "wrapper"]


class CallText(NamedTuple):
    """Calls or pieces of them, and how they were written: empty if a call goes on."""

    text: str
    calls: Sequence[Call | Arguments]


Piece: TypeAlias = str | Marker | CallText
"""Of an output. A string is any text."""
_NO_CALLS = CallSyntax("none", "", "")
_MOST_RETRIES = 8
_SLICE = 512
_LINE_ENDS = 16


class CallFinder:
    """Finds calls in an output, and the markers around them. The texts of all pieces together are the output.

    What is malformed or incomplete, or calls a function that was not offered, is text, unless a piece of it was
    returned as a call. So is a start marker in an inline code, or one before something that begins no call.
    """

    def __init__(
        self, syntax: CallSyntax | None = None, tools: Tools = (), wrappers: Sequence[str] = (), thought_end: str = ""
    ) -> None:
        """`wrappers`: markers around the text; `thought_end`: a marker that ends an unfinished call."""
        self._syntax = syntax = syntax or _NO_CALLS
        self._tools = tools
        self._beginning = beginning_of_calls(tools)
        self._end, self._thought_end = syntax.end, thought_end
        opening, closing = self._section = syntax.section or ("", "")
        self._in_call_markers = [syntax.start, syntax.end, closing, thought_end]
        # Models also write an end marker alone.
        stray = "" if syntax.end in syntax.start else syntax.end
        self._borders: dict[str, Marker] = {
            **{text: Marker(text, "wrapper") for text in wrappers},
            opening: Marker(opening, "opening"),
            **{text: Marker(text, "closing") for text in (closing, stray)},
        }
        self._text_markers = [syntax.start, thought_end, *self._borders]
        self._scanner = StopScanner(self._text_markers)
        self._in_call = False
        self._content = ""
        """Of the call at hand."""
        self._stream = CallStream(syntax, tools)
        self._streamed = 0
        """Characters of the call that `_stream` knows."""
        self._begun = False
        """Its name is known."""
        self._values = Values(())
        self._read = 0
        """Characters of the call that `_values` knows."""
        self._passed: list[int] = []
        """Where end markers begin in its values."""
        self._retries = 0
        self._line = ""
        """The beginning and the end of the line so far."""
        self._fenced = False
        """In a block of code."""

    @property
    def inside(self) -> bool:
        """Whether a call was begun that will have an end marker."""
        return bool(self._end) and self._in_call

    def push(self, text: str) -> list[Piece]:
        # Each marker costs a search of the rest.
        slices = (text[begin : begin + _SLICE] for begin in range(0, len(text), _SLICE))
        return [piece for part in slices for piece in self._push(part)]

    def _push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before, crossed = self._scanner.push(text)
            found, text = (self._scanner.found or "", self._scanner.rest) if crossed else ("", "")
            if self._in_call:
                self._content += before
                if not self._may_be_call():
                    text = self._content + (found or self._scanner.flush()) + text
                    pieces.append(self._text(self._leave()))
                    continue
                # What is behind an end marker in a value may turn out to be behind the call.
                pieces += self._certain(self._passed[0] if self._passed else len(self._content))
            elif before:
                pieces.append(self._text(before))
            if not found:
                return pieces
            pieces += self._cross_in_call(found) if self._in_call else self._cross(found)
            self._scanner = StopScanner(self._in_call_markers if self._in_call else self._text_markers)

    def finish(self) -> list[Piece]:
        """The pieces that were held back. What is pushed later is no part of them."""
        held = self._scanner.flush()
        if not self._in_call:
            return [self._text(held)] if held else []
        self._content += held
        if not self._passed:
            return self._leave_call()
        return [*self._ended_before(), *self.finish()]

    def _may_be_call(self) -> bool:
        head = None if self._begun else self._beginning.match(self._content[:LONGEST_HEAD])
        self._begun = self._begun or (head is not None and head["name"] is not None)
        return self._begun or (head is not None and len(self._content) < LONGEST_HEAD)

    def _cross(self, marker: str) -> list[Piece]:
        """Go behind a marker outside calls."""
        if marker == self._syntax.start and self._may_start():
            self._in_call, self._content, self._begun, self._read = True, "", False, 0
            self._values, self._passed = Values(self._syntax.values), []
            self._stream, self._streamed = CallStream(self._syntax, self._tools), 0
            return []
        self._text(marker)
        if marker in (self._thought_end, self._section[0]):
            self._line, self._fenced = "", False
        return [self._borders.get(marker, marker)]

    def _cross_in_call(self, marker: str) -> list[Piece]:
        place = len(self._content)
        in_value = self._values.push(self._content[self._read :])
        self._read = place
        if not in_value:
            return self._leave_call(marker) if marker == self._end else [*self._leave_call(), *self._cross(marker)]
        # Where another call begins directly behind an end, this one has ended, in a value without an end.
        between = self._content[self._passed[-1] + len(self._end) :] if self._passed else "text"
        opening, closing = self._section
        if marker == self._syntax.start and not between.replace(closing, "").replace(opening, "").strip():
            self._passed = self._passed[-1:]
            return [*self._ended_before(), *self._cross(marker)]
        self._content += marker
        self._passed += [place] if marker == self._end else []
        return []

    def _may_start(self) -> bool:
        """A call is in no inline code. One that has tags begins a line or a section, outside a block of code."""
        begins = not (self._syntax.tagged and (self._line.strip() or self._fenced))
        return begins and not self._line.endswith("`")

    def _leave_call(self, end: str = "") -> list[Piece]:
        """The call at hand, or its text. `end`: its end marker, if it has one."""
        pieces, found = self._certain(len(self._content)), self._stream.finish(marked=bool(end))
        text = self._leave() + self._content
        if found is None:
            return [self._text(text + end)]
        self._line = ""
        if not found.rest:
            return [*pieces, CallText(text + end, found.calls)]
        call = CallText(text.removesuffix(found.rest), found.calls)
        return [*pieces, call, self._text(found.rest), *(self._cross(end) if end else ())]

    def _certain(self, end: int) -> list[Piece]:
        """What is certain of the call at hand by its first `end` characters."""
        parts = self._stream.push(self._content[self._streamed : end])
        self._streamed = end
        return [CallText("", parts)] if parts else []

    def _ended_before(self) -> list[Piece]:
        """The call at hand up to the first end marker that seemed to be in a value, and what follows."""
        self._retries += 1
        if self._retries > _MOST_RETRIES:
            return self._leave_call()
        place, content = self._passed[0], self._content
        self._content = content[:place]
        return [*self._leave_call(self._end), *self.push(content[place + len(self._end) :])]

    def _leave(self) -> str:
        """Go on with text. Returns the start marker."""
        self._in_call, self._scanner = False, StopScanner(self._text_markers)
        return self._syntax.start

    def _text(self, text: str) -> str:
        """`text`, whose lines are looked at."""
        *lines, last = (self._line + text).split("\n")
        self._fenced ^= bool(sum(line.lstrip().startswith("```") for line in lines) % 2)
        self._line = last[:_LINE_ENDS] + last[_LINE_ENDS:][-_LINE_ENDS:]
        return text
