"""Finds stop strings in text that arrives in pieces, and in an answer but not in its thoughts. Pure."""

import re
from collections.abc import Sequence
from enum import Enum

from orchestrator.text.tokenizer import MARK
from protocol.messages.client import ThoughtText


class StopScanner:
    """Cuts a text at its first stop string, wherever the borders between pieces fall.

    The first stop string is the one that ends first; of several with the same end, the one that begins first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""
        self.rest = ""
        """The text behind it, as far as it came in the same piece."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can't be part of a stop string, and whether one was found.

        The text ends before the stop string. Text that is pushed later is a new one.
        """
        first, end = "", len(text)
        for search in self._searches:
            found = search.push(text, end)
            if found is not None and (found < end or len(search.stop) > len(first)):
                first, end = search.stop, found
        if not first:
            text = self._held + text
            keep = len(text) - max((search.matched for search in self._searches), default=0)
            self._held = text[keep:]
            return text[:keep], False
        self.rest = text[end:]
        self.found = first
        return (self.flush() + text[:end]).removesuffix(first), True

    @property
    def held(self) -> str:
        """Text that may be the beginning of a stop string."""
        return self._held

    def flush(self) -> str:
        """Return and forget the held text, at the end of the text."""
        held, self._held = self._held, ""
        for search in self._searches:
            search.matched = 0
        return held


class _Search:
    """Reads each character of a text once, and never again with a later piece (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters of `stop` that the text ends with."""
        self._borders = [0, 0]
        """For a number of matched characters, how many are matched if the next one differs. Grows with the matches, so
        that a long stop string costs nothing before it is met."""

    def push(self, text: str, end: int) -> int | None:
        """Where the first stop string in `text[:end]` ends; None if there is none."""
        stop, borders, matched, place = self.stop, self._borders, self.matched, 0
        while place < end:
            if not matched and (place := text.find(stop[0], place, end)) < 0:
                break
            while matched and stop[matched] != text[place]:
                matched = borders[matched]
            matched += stop[matched] == text[place]
            place += 1
            if matched == len(stop):
                return place
            if matched == len(borders):
                borders.append(self._border(matched))
        self.matched = matched
        return None

    def _border(self, length: int) -> int:
        """The longest beginning of the first `length` characters that is an end of them, but not all of them."""
        stop, borders, last = self.stop, self._borders, self.stop[length - 1]
        border = borders[length - 1]
        while border and stop[border] != last:
            border = borders[border]
        return border + (stop[border] == last)


class Place(Enum):
    """Where a piece of an output is."""

    BEFORE = "before"
    """The start marker, and white space before it."""
    THOUGHT = "thought"
    END = "end"
    """The end marker."""
    ANSWER = "answer"


_LINE = 200
"""Characters of a line before and behind an end marker, in which there may be quotation marks around it."""


class ThoughtScanner:
    """Tells a thought from the answer behind it, wherever the borders between pieces fall. No character is lost or
    changes its place.

    An end marker between backticks or quotation marks of one line is a part of the thought.
    """

    def __init__(self, start: str, end: str, opened: bool) -> None:
        """`opened`: the prompt ends with the start marker, so the output begins inside the thought."""
        self._markers = start, end
        self._opened = opened
        self._end = StopScanner([end])
        self._held = ""
        """Text that may become the start marker, or behind an end marker that may be quoted."""
        self._line = ""
        """The end of the thought's last line so far."""
        self._quotes = ""
        """A pattern of the quotation marks that are open before an end marker: if one of them follows, it is quoted."""
        self.place = Place.BEFORE

    def reopen(self) -> None:
        """What follows is a thought if it begins with the start marker."""
        self.place, self._opened = Place.BEFORE, False

    def push(self, text: str) -> list[tuple[Place, str]]:
        """The pieces that are certain now; a part of the answer is the last one."""
        found: list[tuple[Place, str]] = []
        start, _ = self._markers
        if self.place is Place.BEFORE:
            text, self._held = self._held + text, ""
            content = text.lstrip()
            if start.startswith(content) and content != start:
                self._held = text
                return found
            self.place = Place.ANSWER
            # Some models repeat the marker that the prompt ends with.
            if self._opened or (start and content.startswith(start)):
                self.place, self._line = Place.THOUGHT, ""
                content = content.removeprefix(start)
                found.append((Place.BEFORE, text[: len(text) - len(content)]))
                text = content
        while self.place is Place.THOUGHT:
            if not self._quotes:
                thought, ended = self._end.push(text)
                found.append(self._thinking(thought))
                if not ended:
                    return found
                # An apostrophe is a quotation mark only if it touches the marker.
                marks = (r"\A'" if self._line.endswith("'") else "", *(m for m in '`"' if self._line.count(m) % 2))
                self._quotes, text = "|".join(filter(None, marks)) if start else "", self._end.rest
            self._held += text
            closing = re.search(f"{self._quotes}|\n", self._held) if self._quotes else None
            if self._quotes and closing is None and len(self._held) < _LINE:
                return found
            text, self._held, self._quotes = self._held, "", ""
            found.append(self._cross(quoted=closing is not None and closing[0] != "\n"))
        return [*found, (Place.ANSWER, text)] if text else found

    def flush(self) -> list[tuple[Place, str]]:
        """Return and forget the held text, at the end of the output or before what is no part of a marker."""
        found = [self._cross(quoted=False)] if self._quotes else []
        if self.place is Place.BEFORE:
            self.place = Place.THOUGHT if self._opened else Place.ANSWER
            found += [(Place.BEFORE, "")] if self._opened else []
        held, self._held, self._quotes = self._held, "", ""
        return [*found, (self.place, held + self._end.flush())]

    def _cross(self, *, quoted: bool) -> tuple[Place, str]:
        _, end = self._markers
        if quoted:
            return self._thinking(end)
        self.place = Place.ANSWER
        return Place.END, end

    def _thinking(self, thought: str) -> tuple[Place, str]:
        self._line = (self._line + thought).rpartition("\n")[2][-_LINE:]
        return Place.THOUGHT, thought


class AnswerStops:
    """As StopScanner; inside a thought the text goes on whatever it has. No character is lost or changes its place."""

    def __init__(self, stops: Sequence[str], thought: ThoughtText | None = None) -> None:
        self._stops = StopScanner(stops)
        self._thought = thought and ThoughtScanner(thought.start, thought.end, thought.opened)

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can't be part of a stop string or of a marker, and whether a stop string was found."""
        if self._thought is None:
            return self._stops.push(text)
        kept = ""
        while text:
            pieces, text = self._thought.push(text), ""
            for place, piece in pieces:
                if place is not Place.ANSWER:
                    kept += piece
                    continue
                answer, mark, text = piece.partition(MARK)
                spoken, stopped = self._stops.push(answer)
                kept += spoken
                if stopped:
                    return kept, True
                if mark:
                    kept += self._stops.flush() + mark
                    self._thought.reopen()
        return kept, False

    def flush(self) -> str:
        """Return and forget the held text, at the end of the text."""
        thought = self._thought.flush() if self._thought else ()
        return "".join(text for _, text in thought) + self._stops.flush()
