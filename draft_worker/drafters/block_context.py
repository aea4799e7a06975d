"""The context of one sequence at a block drafter: keys and values of the tokens whose features were fed.

Knows no trees, and not where keys and values lie. A token's keys and values depend on its own features and position
alone, so a gap of lost features costs the tokens in it and nothing else.
"""

from bisect import bisect_left
from typing import Protocol, Self

from draft_worker.drafters.fed_rows import FedRows, Rows, safe

_RIDERS = 32
"""At most this many fed tokens are read along with the next blocks."""


class ContextStore(Protocol):
    """The keys and values of every layer, of tokens in the order in which they were added."""

    def add(self, fed: FedRows) -> None:
        """Add the tokens with these features, perhaps lazily."""
        ...

    def compute(self) -> None:
        """Compute what was added."""
        ...

    def keep(self, count: int) -> None:
        """Drop the tokens behind the first `count`."""
        ...

    def copy(self, count: int) -> Self:
        """Another store with the first `count` tokens."""
        ...

    @property
    def memory(self) -> int:
        """Bytes of keys and values."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


class BlockContext:
    """Grows as features are fed, and shrinks with the committed prefix."""

    def __init__(self, store: ContextStore) -> None:
        self.store = store
        self.positions: list[int] = []
        """Indices of the tokens in the store, ascending."""
        self._waiting: list[FedRows] = []

    @property
    def end(self) -> int:
        """Index behind the last token that was fed."""
        return self._waiting[-1].end if self._waiting else self.positions[-1] + 1 if self.positions else 0

    def feed(self, first: int, rows: Rows) -> None:
        """Features of the tokens from index `first` on; those that were fed already are left out."""
        fed = FedRows(first, safe(rows)).part(self.end, first + len(rows))
        if len(fed.rows):
            self._waiting.append(fed)

    @property
    def unread(self) -> bool:
        """Whether more tokens wait than may ride along with blocks."""
        return sum(len(fed.rows) for fed in self._waiting) > _RIDERS

    def read(self, most: int) -> int:
        """Compute the keys and values of at most `most` waiting tokens. Returns their number."""
        left = most
        while self._waiting and left > 0:
            fed = self._waiting.pop(0)
            now, later = fed.part(fed.first, fed.first + left), fed.part(fed.first + left, fed.end)
            if len(later.rows):
                self._waiting.insert(0, later)
            left -= len(now.rows)
            self._append(now)
        self.store.compute()
        return most - left

    def read_all(self) -> None:
        """The same for all waiting tokens, perhaps lazily."""
        for fed in self._waiting:
            self._append(fed)
        self._waiting = []

    def truncate(self, length: int) -> None:
        """Keep the tokens before index `length`."""
        kept = bisect_left(self.positions, length)
        self.store.keep(kept)
        del self.positions[kept:]
        parts = [fed.part(0, length) for fed in self._waiting]
        self._waiting = [fed for fed in parts if len(fed.rows)]

    def copy(self, length: int) -> "BlockContext":
        """The context of another sequence with the same first `length` tokens."""
        kept = bisect_left(self.positions, length)
        other = BlockContext(self.store.copy(kept))
        other.positions = self.positions[:kept]
        other._waiting = list(self._waiting)
        other.truncate(length)
        return other

    def _append(self, fed: FedRows) -> None:
        self.store.add(fed)
        self.positions += range(fed.first, fed.end)
