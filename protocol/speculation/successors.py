"""Which token most often follows one or two others in what a target writes: a table beside its draft. With it a text
that has not repeated itself yet has guesses too, which take no time of a draft. Pure but for the reading of its file.

Rows of (before, last, next, chance), uint32, ascending: `next` follows the tokens `before` and `last`, or `last` behind
any token where `before` is ANY, with the probability chance / CERTAIN.
"""

import logging
from array import array
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path

SUCCESSORS = "successors.bin"
"""The file: its rows behind one another, little-endian."""
ANY, CERTAIN = (1 << 31) - 1, (1 << 32) - 1
_COLUMNS = 4
log = logging.getLogger(__name__)


class Successors:
    def __init__(self, rows: bytes) -> None:
        """Raises ValueError for what is no such table."""
        if len(rows) % 16:
            raise ValueError("its last row is cut")
        numbers = array("I", rows)
        before, last, self._next, self._chances = (numbers[column::_COLUMNS] for column in range(_COLUMNS))
        self._keys = [first << 32 | second for first, second in zip(before, last, strict=True)]
        if any(earlier >= later for earlier, later in pairwise(self._keys)):
            raise ValueError("its rows do not ascend")

    def after(self, before: int, last: int) -> tuple[int, float] | None:
        """The token, and its probability."""
        for key in (before << 32 | last, ANY << 32 | last):
            place = bisect_left(self._keys, key)
            if self._keys[place : place + 1] == [key]:
                return self._next[place], self._chances[place] / CERTAIN
        return None


def stored_successors(folder: str | Path) -> Successors | None:
    """The table in `folder`; None for no folder, without the file, or with a damaged one: it is not needed."""
    file = Path(folder) / SUCCESSORS
    try:
        return Successors(file.read_bytes()) if folder and file.is_file() else None
    except (OSError, ValueError) as error:
        log.warning("%s is left out (%s)", file, error)
        return None
