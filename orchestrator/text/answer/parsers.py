"""Reads an output piece by piece: thoughts, text, tool calls. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.text.answer.call_finder import CallFinder, CallText, Marker, Piece
from orchestrator.text.answer.call_syntax import CallLimit
from orchestrator.text.answer.parts import Part, Reasoning, Spoken, ThoughtSpan
from orchestrator.text.stop_scanner import Place, ThoughtScanner
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


class ThoughtParser:
    """Splits an answer into its thoughts and the rest. Inside the text, only `mark` tells a marker from text.

    White space at both ends of a thought is dropped, and white space between the thought and the text, unless it alone
    parts the text from what was said before. Calls in a thought are a part of it if it ends behind them and an answer
    follows; else the first one of them ends it.
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
        self._undecided: list[tuple[Place, Piece]] = []
        """Calls in the thought, and what stands behind each of them."""

    def mark(self, *, may_open: bool) -> list[Reasoning | Piece]:
        """The output has a mark here: what follows is a token of its own. It begins a thought if it is the start
        marker, unless a thought is open."""
        parts: list[Reasoning | Piece] = []
        if may_open and self._scanner.place is Place.ANSWER:
            parts = self._quoted()
            self._scanner.reopen()
            self._fresh, self._gap, self._begun = True, False, False
            self.thoughts.append(ThoughtSpan(self._seen))
        self.pass_over(1)
        return parts

    def pass_over(self, characters: int) -> None:
        """So many characters of the output are not pushed."""
        self._seen += characters

    def push(self, piece: Piece) -> list[Reasoning | Piece]:
        if isinstance(piece, str):
            return self._placed(self._scanner.push(piece))
        parts = self._placed(self._scanner.flush())
        return [*parts, *self._placed([(self._scanner.place, piece)])]

    def finish(self) -> list[Reasoning | Piece]:
        parts = self._placed(self._scanner.flush())
        if not self._called:
            return [*parts, *self._quoted()]
        self.thoughts[-1] = ThoughtSpan(self.thoughts[-1].begin, self._seen)
        for place, piece in self._undecided:
            if not isinstance(piece, str):
                parts.append(piece)
                self._held, self._fresh = "", True
            elif place is Place.THOUGHT:
                parts += self._thought(piece)
        return parts

    @property
    def _called(self) -> bool:
        return any(isinstance(piece, CallText) for _, piece in self._undecided)

    def _placed(self, found: Sequence[tuple[Place, Piece]]) -> list[Reasoning | Piece]:
        parts: list[Reasoning | Piece] = []
        for place, piece in found:
            said = isinstance(piece, str) and bool(piece.strip())
            calls = isinstance(piece, CallText) or (isinstance(piece, Marker) and piece.place == "opening")
            if self._undecided and (place is Place.ANSWER and (said or calls) if self._called else said):
                parts += self._quoted()
            if self._undecided or (calls and place is Place.THOUGHT):
                self._undecided.append((place, piece))
            else:
                parts += self._part(place, piece)
        return parts

    def _quoted(self) -> list[Reasoning | Piece]:
        """The calls in the thought are a part of it."""
        undecided, self._undecided = self._undecided, []
        return [part for place, piece in undecided for part in self._part(place, piece)]

    def _part(self, place: Place, piece: Piece) -> list[Reasoning | Piece]:
        text = piece if isinstance(piece, str) else piece.text
        self._seen += len(text)
        match place:
            case Place.BEFORE:
                self._begun = True
            case Place.THOUGHT:
                return self._thought(text)
            case Place.END:
                self._held = ""
                self._gap = not self._last or self._last.isspace()
                self.thoughts[-1] = ThoughtSpan(self.thoughts[-1].begin, self._seen)
            case Place.ANSWER:
                return self._answer(piece)
        return []

    def _thought(self, text: str) -> list[Reasoning | Piece]:
        text = self._held + text
        if self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._fresh = self._fresh and not kept
        return [Reasoning(kept)] if kept else []

    def _answer(self, piece: Piece) -> list[Reasoning | Piece]:
        text = piece if isinstance(piece, str) else piece.text
        if piece == "":
            return []
        if not self._begun:
            self.thoughts.pop()
            self._begun = True
        if self._gap and isinstance(piece, str):
            piece = text = text.lstrip()
        self._gap = piece == ""
        if self._gap:
            return []
        self._last = text[-1:] or self._last
        return [piece]


_PIECES = re.compile(rf"[^{MARK}]+|{MARK}{MARK}|{MARK}")
"""Texts, marks that are text, and marks."""


class MarkedParser:
    """Thoughts, if the model writes any, text and calls.

    A thought comes first, or at a `MARK`, but not inside a call. Two `MARK`s are one that is text. Markers around calls
    are dropped, and white space between calls, unless no call is there.
    """

    def __init__(
        self,
        thought: ThoughtParser | None = None,
        calls: CallFinder | None = None,
        most: int | None = None,
        marks: bool = True,
    ) -> None:
        """`most`: number of calls that the client accepts, further ones are dropped; None for any number. `marks`:
        without them, a `MARK` is text."""
        self._marks = marks and thought is not None
        self._thought = thought or ThoughtParser(ThoughtMarkers("", ""), opened=False)
        self._finder = calls or CallFinder()
        self._kept = CallLimit(most).kept
        self._held = ""
        """A `MARK` at the end of the text so far: a second one may follow."""
        self._between = ""
        """Behind a call or an opening: white space and markers, which are dropped unless text follows."""
        self._behind_call = False

    @property
    def thoughts(self) -> Sequence[ThoughtSpan]:
        return self._thought.thoughts

    def push(self, text: str) -> Sequence[Part]:
        if not self._marks:
            return self._parsed(self._finder.push(text))
        text = self._held + text
        self._held = MARK if (len(text) - len(text.rstrip(MARK))) % 2 else ""
        parts: list[Part] = []
        for piece in _PIECES.findall(text.removesuffix(self._held)):
            if piece == MARK:
                may_open = not self._finder.inside
                parts += self._parsed(self._finder.finish()) if may_open else []
                parts += self._said(self._thought.mark(may_open=may_open))
                continue
            if piece == 2 * MARK:
                self._thought.pass_over(1)
                piece = MARK
            parts += self._parsed(self._finder.push(piece))
        return parts

    def finish(self) -> Sequence[Part]:
        parts = self._parsed(self._finder.finish())
        return [*parts, *self._said(self._thought.finish()), *self._between_calls()]

    def _parsed(self, pieces: Sequence[Piece]) -> list[Part]:
        return [part for piece in pieces for part in self._said(self._thought.push(piece))]

    def _said(self, pieces: Sequence[Reasoning | Piece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                parts.append(piece)
            elif isinstance(piece, CallText):
                parts += self._kept(piece.calls)
                self._between, self._behind_call = "", True
            elif isinstance(piece, str):
                space = piece.isspace() and (self._behind_call or self._between)
                parts += self._between_calls(piece, dropped=bool(space))
            elif piece.place == "closing" and self._behind_call and not self._between.strip():
                self._between = ""
            elif piece.place != "wrapper":
                parts += self._between_calls(piece.text, dropped=piece.place == "opening")
        return parts

    def _between_calls(self, text: str = "", *, dropped: bool = False) -> list[Part]:
        """What is no white space between calls, since `text` or the end of the answer follows. `dropped`: unless text
        follows."""
        self._between += text
        if dropped or not (text or self._between.strip()):
            return []
        said, self._between, self._behind_call = self._between, "", False
        return [Spoken(said)]
