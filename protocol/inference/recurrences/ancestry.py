"""Which rows of a tree lie on the path of which others. Pure numpy."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np


@lru_cache(maxsize=4)
def ancestry(parents: tuple[int, ...]) -> "Ancestry":
    """Of these rows. All layers of a forward ask for the same."""
    return Ancestry(parents)


class Ancestry:
    """Rows in an order in which parents come before their children."""

    def __init__(self, parents: Sequence[int]) -> None:
        """`parents[i]`: the row before row i, or -1."""
        self.paths: list[tuple[int, ...]] = []
        """For each row, the rows from the first one of its path to itself."""
        for row, parent in enumerate(parents):
            self.paths.append((*(self.paths[parent] if parent >= 0 else ()), row))
        self.depth = max(len(path) for path in self.paths)
        """Rows of the longest path."""
        seen: Any = np.zeros((len(parents), len(parents)), dtype=bool)
        for row, path in enumerate(self.paths):
            seen[row, list(path)] = True
        self.seen = mx.array(seen)
        """(R, R): row i sees row j, itself included."""
        self.before = mx.array(seen & ~np.eye(len(parents), dtype=bool))
        """(R, R): the same without itself."""
        self._windows: dict[int, mx.array] = {}
        """By width."""

    def windows(self, width: int) -> mx.array:
        """(R, width): for each row, the last `width` of `width` - 1 earlier entries and its path, where the entries
        come first and row i is at `width` - 1 + i."""
        if width not in self._windows:
            earlier = range(width - 1)
            found = [[*earlier, *(width - 1 + row for row in path)][-width:] for path in self.paths]
            self._windows[width] = mx.array(found)
        return self._windows[width]
