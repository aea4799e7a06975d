"""Finds stop strings in text that arrives in pieces, and in an answer but not in its thoughts. Pure."""

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


class _State(Enum):
    BEFORE = "before"
    """Only white space, and perhaps the beginning of the start marker."""
    THOUGHT = "thought"
    ANSWER = "answer"


class AnswerStops:
    """As StopScanner; inside a thought the text goes on whatever it has. No character is lost or changes its place."""

    def __init__(self, stops: Sequence[str], thought: ThoughtText | None = None) -> None:
        self._stops = StopScanner(stops)
        self._thought = thought
        self._end = StopScanner([thought.end] if thought else [])
        self._held = ""
        """Text that may become the start marker."""
        self._state = _State.ANSWER if thought is None else _State.THOUGHT if thought.opened else _State.BEFORE

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
            match self._state:
                case _State.BEFORE:
                    text = self._before(text, self._thought.start)
                case _State.THOUGHT:
                    before, ended = self._end.push(text)
                    kept += before + self._thought.end * ended
                    text = self._end.rest if ended else ""
                    self._state = _State.ANSWER if ended else self._state
                case _State.ANSWER:
                    answer, mark, text = text.partition(MARK)
                    spoken, stopped = self._stops.push(answer)
                    kept += spoken
                    if stopped:
                        return kept, True
                    if mark:
                        kept += self._stops.flush() + mark
                        self._state = _State.BEFORE
        return kept, False

    def flush(self) -> str:
        """Return and forget the held text, at the end of the text."""
        held, self._held = self._held, ""
        return held + self._end.flush() + self._stops.flush()

    def _before(self, text: str, start: str) -> str:
        """The text with which the next state goes on; empty while it may become the start marker."""
        text, self._held = self._held + text, ""
        content = text.lstrip()
        if start.startswith(content) and content != start:
            self._held = text
            return ""
        self._state = _State.THOUGHT if start and content.startswith(start) else _State.ANSWER
        return text
