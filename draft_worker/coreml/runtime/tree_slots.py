"""Which KV slot holds what, when slots are few: committed tokens first, tree rows in whatever is free behind.

Pure bookkeeping; knows no arrays of keys and no model. A package has a fixed number of slots, so slots are
used again, and a row for which there is none goes without: it has no keys, hence no candidates and no children.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from draft_worker.coreml.arrays import Single

HIDDEN = -1e4
"""Added to the score of what a token may not see: far below any score, and still a number in fp16."""
PREFIX = -1
"""Parent of a row that directly follows the committed tokens."""


class PackageRow(NamedTuple):
    """An evaluated tree token."""

    slot: int | None
    parent: int
    position: int
    token: int


class Kept(NamedTuple):
    """What `keep` asks of whoever holds the keys."""

    exchanged: list[tuple[int, int]]
    """Pairs of slots whose contents change places, in this order."""
    unwritten: list[int]
    """Tokens that were committed without keys: they have to be evaluated again. At most one."""


class TreeSlots:
    """The slots of one sequence, with committed tokens at slots [0, committed), in order.

    Row numbers are never reused; what a caller must not do is asserted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self.next_row = 0
        self.visible: Single = np.full(capacity, HIDDEN, np.float32)
        """0 for the slots of committed tokens, HIDDEN for all others."""
        self._rows: dict[int, PackageRow] = {}
        self._tip = PREFIX
        """Row number of the last committed token, if it was a row."""
        self._free: list[int] = []
        """A heap of slots below `_top` that hold nothing; those of committed tokens may still stand in it."""
        self._top = 0
        """No slot from here on is in use."""

    def row(self, number: int) -> PackageRow:
        return self._rows[number]

    def places(self, numbers: Sequence[int]) -> list[int]:
        """Slots of these rows, as far as they have one."""
        return [slot for number in numbers if (slot := self._rows[number].slot) is not None]

    def add(self, tokens: Sequence[int], parents: Sequence[int], width: int) -> list[int]:
        """Numbers of new rows, parents before children. `width` tokens will be written for them, if any are."""
        numbers = list(range(self.next_row, self.next_row + len(tokens)))
        slots = iter(self._take(len(tokens), width))
        for number, token, parent in zip(numbers, tokens, parents, strict=True):
            parent = self._tip if parent == PREFIX else parent
            behind = None if parent == self._tip else self._rows[parent]
            slot = next(slots, None) if behind is None or behind.slot is not None else None
            position = self.committed if behind is None else behind.position + 1
            self._rows[number] = PackageRow(slot, parent, position, token)
        self.next_row += len(tokens)
        self._free_all(slots)
        return numbers

    def show(self, numbers: Sequence[int], mask: Single) -> None:
        """Fill (width, capacity + width) `mask` for a call that evaluates these rows, in this order.

        0 where a row may look, HIDDEN elsewhere: at the committed slots, at its ancestors and itself. Rows of
        the call stand behind the slots. Nothing is allocated.
        """
        mask[:, : self.capacity] = self.visible
        mask[:, self.capacity :] = HIDDEN
        column = {number: self.capacity + index for index, number in enumerate(numbers)}
        for index, number in enumerate(numbers):
            while (row := self._rows.get(number)) is not None:
                mask[index, column.get(number, row.slot)] = 0
                number = row.parent

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> Kept:
        """Commit the rows of `path` in order, keep those in `surviving`, forget the others."""
        staying = {*path, *surviving}
        self._free_all(row.slot for number, row in self._rows.items() if number not in staying)
        self._rows = {number: row for number, row in self._rows.items() if number in staying}
        exchanged: list[tuple[int, int]] = []
        for index, number in enumerate(path):
            row = self._rows[number]
            assert row.parent == self._tip, "a committed path must continue the committed tokens"
            if row.slot is None:
                assert index == len(path) - 1, "nothing follows a row without keys"
                del self._rows[number]
                return Kept(exchanged, [row.token])
            exchanged += self._settle(number, row.slot)
            del self._rows[number]
            self._tip = number
            self.committed += 1
        return Kept(exchanged, [])

    def truncate(self, length: int) -> None:
        """Forget committed tokens from index `length` on, and all rows."""
        assert 0 <= length <= self.committed
        self.visible[length:] = HIDDEN
        self.committed = self._top = length
        self._forget_rows()

    def adopt(self, tokens: int) -> None:
        """So many tokens are committed already; there must be nothing else."""
        assert not self._top
        assert tokens <= self.capacity
        self.visible[:tokens] = 0
        self.committed = self._top = tokens

    def _forget_rows(self) -> None:
        self._rows = {}
        self._free = []
        self._tip = PREFIX

    def _take(self, count: int, width: int) -> list[int]:
        """Up to `count` free slots, the lowest first."""
        taken: list[int] = []
        while len(taken) < count and self._free:
            slot = heapq.heappop(self._free)
            if slot >= self.committed:
                taken.append(slot)
        fresh = min(count - len(taken), self.capacity - self._top)
        taken += range(self._top, self._top + fresh)
        self._top += fresh
        return taken

    def _free_all(self, slots: Iterable[int | None]) -> None:
        for slot in slots:
            if slot is not None:
                heapq.heappush(self._free, slot)

    def _settle(self, number: int, slot: int) -> list[tuple[int, int]]:
        """Bring a row to the slot behind the committed ones; whoever is there takes its place."""
        place = self.committed
        self.visible[place] = 0
        if slot == place:
            return []
        other = next((other for other, row in self._rows.items() if row.slot == place), None)
        if other is None:
            self._free_all([slot])
        else:
            self._rows[other] = self._rows[other]._replace(slot=slot)
        return [(slot, place)]


class FixedSlots(TreeSlots):
    """The same for keys that only a model can write, a whole call's width side by side: nothing is moved, so
    committed tokens lie where they were evaluated, until `compact`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: list[int] = []
        """Slots of the committed tokens, in the tokens' order."""

    @property
    def room(self) -> int:
        """Slots in a row that are free."""
        return self.capacity - self._top

    def cramped(self, width: int) -> bool:
        """No room for a call of this width until `compact`."""
        return self.room < width and self._top > len(self._order) + len(self._rows)

    def compact(self) -> list[int]:
        """Close the gaps: the contents of the i-th of these slots go to slot i."""
        written = [number for number, row in self._rows.items() if row.slot is not None]
        sources = self._order + self.places(written)
        for slot, number in enumerate(written, start=len(self._order)):
            self._rows[number] = self._rows[number]._replace(slot=slot)
        self._order = list(range(len(self._order)))
        self.visible[:] = HIDDEN
        self.visible[self._order] = 0
        self._top = len(sources)
        return sources

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> Kept:
        kept = super().keep(path, surviving)
        self._lower()
        return kept

    def truncate(self, length: int) -> None:
        self.visible[self._order[length:]] = HIDDEN
        del self._order[length:]
        self.committed = length
        self._forget_rows()
        self._lower()

    def _lower(self) -> None:
        self._top = 1 + max([*self._order[-1:], *self.places(list(self._rows))], default=-1)

    def _take(self, count: int, width: int) -> list[int]:
        if self.room < width:
            return []
        taken = list(range(self._top, self._top + count))
        self._top += count
        return taken

    def _settle(self, number: int, slot: int) -> list[tuple[int, int]]:
        self.visible[slot] = 0
        self._order.append(slot)
        return []
