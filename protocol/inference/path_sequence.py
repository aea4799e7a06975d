"""Trees on a model that evaluates one path: every path by itself, behind what it shares with the one before it."""

from collections.abc import Iterable, Sequence

import mlx.core as mx

from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence


class PathSequence:
    """Committed tokens and a tree of rows, as a `TreeSequence` has them. Of the rows, those of one path have KV."""

    def __init__(self, sequence: TreeSequence) -> None:
        self._sequence = sequence
        self._rows: dict[int, tuple[int, int]] = {}
        """Parent and token of each row. A parent that is no key is the last committed token."""
        self._live: list[tuple[int, int]] = []
        """The rows with KV, a path, each with its number in the sequence."""
        self.next_row = 0

    @property
    def committed(self) -> int:
        return self._sequence.committed

    @property
    def memory(self) -> int:
        return self._sequence.memory

    def reach(self, length: int) -> int:
        return self._sequence.reach(length)

    def forget(self, saved: int) -> None:
        self._sequence.forget(saved)

    def position(self, row: int) -> int:
        return self.committed + len(self._path(row)) - 1

    def prefill(self, tokens: Sequence[int]) -> mx.array | None:
        """As of `TreeSequence`."""
        return self._sequence.prefill(tokens)

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """(L, V) logits of new rows, not yet computed; see `TreeSequence.evaluate`."""
        begin = self.next_row
        for token, parent in zip(tokens, parents, strict=True):
            self._rows[self.next_row] = parent, token
            self.next_row += 1
        found: dict[int, mx.array] = {}
        # The forward of a row evaluates the new rows before it too.
        for row in range(self.next_row - 1, begin - 1, -1):
            if row not in found:
                found |= self._evaluated(self._path(row))
        return mx.stack([found[row] for row in range(begin, self.next_row)])

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """As `TreeSequence.keep`. Rows of the path without KV are evaluated again."""
        shared = self._shared(path)
        tokens = [self._rows[row][1] for row in path[shared:]]
        self._rows = {row: self._rows[row] for row in surviving}
        rest = [] if tokens else [pair for pair in self._live[shared:] if pair[0] in self._rows]
        self._sequence.keep([inner for _, inner in self._live[:shared]], [inner for _, inner in rest])
        self._live = rest
        self._sequence.prefill(tokens)

    def truncate(self, length: int) -> None:
        self._sequence.truncate(length)
        self._rows, self._live = {}, []

    def shed(self) -> bool:
        return self._sequence.shed()

    def shorten(self, length: int) -> None:
        """`truncate`, and free the memory of what is dropped."""
        self.truncate(length)
        self._sequence.shorten(length)

    def copy(self, length: int) -> "PathSequence":
        return PathSequence(self._sequence.copy(length))

    def _evaluated(self, path: Sequence[int]) -> dict[int, mx.array]:
        """Logits of the rows of a path that had no KV."""
        shared = min(self._shared(path), len(path) - 1)
        self._live = self._live[:shared]
        self._sequence.keep((), [inner for _, inner in self._live])
        fresh = path[shared:]
        width = len(fresh) if self._sequence.level == "chain" else 1
        rows: dict[int, mx.array] = {}
        for index in range(0, len(fresh), width):
            rows |= self._extended(fresh[index : index + width])
        return rows

    def _extended(self, rows: Sequence[int]) -> dict[int, mx.array]:
        """Logits of rows that follow the path with KV."""
        first = self._sequence.next_row
        parents = [self._live[-1][1] if self._live else PREFIX, *range(first, first + len(rows) - 1)]
        logits = self._sequence.evaluate([self._rows[row][1] for row in rows], parents)
        self._live += zip(rows, range(first, first + len(rows)), strict=True)
        return dict(zip(rows, logits, strict=True))

    def _path(self, row: int) -> list[int]:
        """Rows from the committed tokens to this one."""
        path: list[int] = []
        while row in self._rows:
            path.insert(0, row)
            row = self._rows[row][0]
        return path

    def _shared(self, path: Sequence[int]) -> int:
        """So many of the first rows of `path` have KV."""
        shared = 0
        for row, (live, _) in zip(path, self._live, strict=False):
            if row != live:
                break
            shared += 1
        return shared
