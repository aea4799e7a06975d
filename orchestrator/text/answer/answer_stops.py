"""Finds stop strings in the text of an output, but not in its thoughts. Pure."""

from collections.abc import Sequence
from enum import Enum

from orchestrator.text.stop_scanner import StopScanner
from orchestrator.text.tokenizer import MARK
from protocol.messages.client import ThoughtText


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
