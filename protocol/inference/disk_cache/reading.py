"""One prompt's KV while a thread reads it: given up by the caller, or ended by the thread."""

import threading
from collections.abc import Sequence
from typing import NamedTuple


class Contents(NamedTuple):
    """What the files of a prefix hold, checked."""

    tokens: int
    """Of the prefix."""
    chunks: list[bytes]
    rest: bytes | None
    """What is behind the whole chunks."""


class Reading:
    """Asks for the longest prefix of `tokens` that is kept."""

    def __init__(self, tokens: Sequence[int], beyond: int) -> None:
        """`beyond`: tokens that the sequence has without it."""
        self.tokens = tokens
        self.beyond = beyond
        self.contents: Contents | None = None
        """None if nothing is kept that helps, and until it has ended."""
        self.warning = ""
        """Why a file was not used."""
        self._given_up = threading.Event()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def given_up(self) -> bool:
        return self._given_up.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long at most. Whether it has ended."""
        return self._ended.wait(seconds)

    def give_up(self) -> None:
        """The thread stops at the next file."""
        self._given_up.set()

    def end(self) -> None:
        self._ended.set()
