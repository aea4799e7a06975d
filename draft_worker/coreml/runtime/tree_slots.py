"""The KV slots of a package: committed tokens have the first slots, tree rows free slots behind them.

Pure bookkeeping; knows no arrays of keys and no model. A package has a fixed number of slots, so slots are reused. If
no slot is free, a row has none: it has no keys, so no candidates and no children.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from draft_worker.coreml.package import Single, Slots
from protocol.inference.slots import PREFIX

HIDDEN = -1e4
"""Added to the score of a hidden slot: far below any score, and within fp16's range."""


class PackageRow(NamedTuple):
    """An evaluated tree token."""

    slot: int | None
    parent: int
    position: int
    token: int


class Kept(NamedTuple):
    """The work that `keep` leaves to the caller, which holds the keys."""

    exchanged: list[tuple[int, int]]
    """Pairs of slots whose contents must be exchanged, in this order."""
    unwritten: list[int]
    """Tokens committed without keys, which must be evaluated again. At most one."""


class TreeSlots:
    """The slots of one sequence, with committed tokens at slots [0, committed), in order.

    Row numbers are never reused. Mistakes of the caller fail an assertion.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self.next_row = 0
        self.visible: Single = np.full(capacity, HIDDEN, np.float32)
        """0 for the slots of committed tokens, HIDDEN for other slots."""
        self._rows: dict[int, PackageRow] = {}
        self._tip = PREFIX
        """Row number of the last committed token, if it was a row."""
        self._free: list[int] = []
        """A heap of free slots below `_top`. It can also contain slots of committed tokens, which `_take` skips."""
        self._top = 0
        """No slot at or above this is in use."""

    @property
    def taken(self) -> int:
        """Slots of committed tokens and of rows."""
        return self.committed + len(self.slots_of(list(self._rows)))

    @property
    def used(self) -> Slots:
        """These slots."""
        return np.concatenate([np.flatnonzero(self.visible == 0), np.array(self.slots_of(list(self._rows)), np.intp)])

    def row(self, number: int) -> PackageRow:
        return self._rows[number]

    def slots_of(self, numbers: Sequence[int]) -> list[int]:
        """Slots of these rows, without the rows that have none."""
        return [slot for number in numbers if (slot := self._rows[number].slot) is not None]

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Add rows, parents before children, and return their numbers."""
        numbers = list(range(self.next_row, self.next_row + len(tokens)))
        slots = iter(self._take(len(tokens)))
        for number, token, parent in zip(numbers, tokens, parents, strict=True):
            parent = self._tip if parent == PREFIX else parent
            above = None if parent == self._tip else self._rows[parent]
            slot = next(slots, None) if above is None or above.slot is not None else None
            position = self.committed if above is None else above.position + 1
            self._rows[number] = PackageRow(slot, parent, position, token)
        self.next_row += len(tokens)
        self._free_all(slots)
        return numbers

    def fill_mask(self, numbers: Sequence[int], mask: Single, window: int | None = None) -> None:
        """Fill (width, capacity + width) `mask` for a call that evaluates these rows, in this order.

        0 at the committed slots, the ancestors of a row and the row itself, HIDDEN elsewhere. With a window, only the
        last `window` of them have 0. The columns behind the slots are the rows of the call. Allocates nothing that
        grows with the context.
        """
        mask[:, : self.capacity] = self.visible
        mask[:, self.capacity :] = HIDDEN
        column = {number: self.capacity + index for index, number in enumerate(numbers)}
        for index, number in enumerate(numbers):
            first = 0 if window is None else max(0, self._rows[number].position + 1 - window)
            mask[index, : min(first, self.committed)] = HIDDEN
            while (row := self._rows.get(number)) is not None and row.position >= first:
                mask[index, column.get(number, row.slot)] = 0
                number = row.parent

    def before(self, number: int) -> Iterator[tuple[int | None, int]]:
        """The tokens before a row along its path, nearest first: row and slot; a committed token is no row."""
        number = self._rows[number].parent
        while (row := self._rows.get(number)) is not None:
            assert row.slot is not None, "only a row with keys has children"
            yield number, row.slot
            number = row.parent
        for position in reversed(range(self.committed)):
            yield None, position

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> Kept:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the rest."""
        kept = {*path, *surviving}
        self._free_all(row.slot for number, row in self._rows.items() if number not in kept)
        self._rows = {number: row for number, row in self._rows.items() if number in kept}
        exchanged: list[tuple[int, int]] = []
        for index, number in enumerate(path):
            row = self._rows[number]
            assert row.parent == self._tip, "a committed path must continue the committed tokens"
            if row.slot is None:
                assert index == len(path) - 1, "nothing follows a row without keys"
                del self._rows[number]
                return Kept(exchanged, [row.token])
            exchanged += self._commit(number, row.slot)
            del self._rows[number]
            self._tip = number
            self.committed += 1
        return Kept(exchanged, [])

    def truncate(self, length: int) -> None:
        """Drop the committed tokens behind `length`, and all rows."""
        assert 0 <= length <= self.committed
        self.visible[length:] = HIDDEN
        self.committed = self._top = length
        self._rows = {}
        self._free = []
        self._tip = PREFIX

    def adopt(self, tokens: int) -> None:
        """Mark the first `tokens` slots as committed. All slots must be free."""
        assert not self._top
        assert tokens <= self.capacity
        self.visible[:tokens] = 0
        self.committed = self._top = tokens

    def _take(self, count: int) -> list[int]:
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

    def _commit(self, number: int, slot: int) -> list[tuple[int, int]]:
        """Commit a row: move it to the first slot behind the committed prefix. A row in that slot moves to `slot`."""
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
