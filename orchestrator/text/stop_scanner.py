"""Finds stop strings in text that arrives in pieces. Pure; knows no tokens."""

from collections.abc import Sequence


class StopScanner:
    """Cuts a text at its first stop string, wherever the borders between pieces fall.

    The first stop string is the one that ends first; of several with the same end, the one that begins first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""
        self.rest = ""
        """The text behind it, as far as it came in the same piece."""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can't be part of a stop string, and whether one was found.

        The text ends before the stop string. Text that is pushed later is a new one.
        """
        text = self._held + text
        first = self._first(text)
        if first is not None:
            start, self.found = first
            self._held = ""
            self.rest = text[start + len(self.found) :]
            return text[:start], True
        keep = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[keep:]
        return text[:keep], False

    @property
    def held(self) -> str:
        """Text that may be the beginning of a stop string."""
        return self._held

    def flush(self) -> str:
        """Return and forget the held text, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        found = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(ends)[1:] if ends else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
