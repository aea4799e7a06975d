"""Assigns KV slots to committed tokens, whose rows may be computed again, and to the rows of a tree behind them.

Pure bookkeeping; knows no arrays of keys and no model. A committed token may be in any slot, so that nothing moves.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from draft_worker.coreml.arrays import Single, Slots
from draft_worker.coreml.runtime.tree_slots import HIDDEN

_MOST_TREE = 256
"""More slots for a tree help no draft."""


class SlotRow(NamedTuple):
    """A row of the tree."""

    slot: int
    parent: int
    position: int


class CallRow(NamedTuple):
    """A row that a call computes."""

    slot: int
    position: int
    row: int | None
    """Its number in the tree; None: a committed token."""


class ReplaceableSlots:
    """The slots of one sequence. Row numbers are never reused. Mistakes of the caller fail an assertion."""

    def __init__(self, capacity: int) -> None:
        """A part of the slots is only for the tree, the others are only for committed tokens, `most_committed`."""
        self.most_rows = max(2, min(_MOST_TREE, capacity // 8))
        self.most_committed = capacity - self.most_rows
        self.next_row = 0
        self.origin = 0
        """Position of the first committed token."""
        self._capacity = capacity
        self._order: list[int] = []
        """Slots of the committed tokens, in the order of the tokens."""
        self._rows: dict[int, SlotRow] = {}
        self._free = list(range(capacity))

    @property
    def committed(self) -> int:
        return len(self._order)

    @property
    def room(self) -> int:
        """Rows of the tree that can be added now."""
        return self.most_rows - len(self._rows)

    @property
    def slots(self) -> Sequence[int]:
        """Those of the committed tokens, in their order."""
        return self._order

    @property
    def taken(self) -> int:
        """Slots of committed tokens and of rows."""
        return len(self._order) + len(self._rows)

    @property
    def used(self) -> Slots:
        """These slots."""
        return np.array([*self._order, *(row.slot for row in self._rows.values())], np.intp)

    def position(self, row: int) -> int:
        return self._rows[row].position

    def replace(self, first: int, count: int) -> list[CallRow]:
        """`count` rows of committed tokens, in place of those from index `first` on."""
        kept = self._order[: first + count]
        self._release(self._order[first + count :])
        self._order = kept + [self._take() for _ in range(first + count - len(kept))]
        return [CallRow(self._order[index], self.origin + index, None) for index in range(first, first + count)]

    def add(self, parents: Sequence[int]) -> list[CallRow]:
        """New rows, parents before children. -1: the parent is the last committed token. At most `room`."""
        assert len(parents) <= self.room, "the tree has no slot left"
        added = []
        for parent in parents:
            above = self._rows.get(parent)
            position = self.origin + self.committed if above is None else above.position + 1
            self._rows[self.next_row] = SlotRow(self._take(), parent, position)
            added.append(CallRow(self._rows[self.next_row].slot, position, self.next_row))
            self.next_row += 1
        return added

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the rest."""
        kept = set(surviving)
        self._order += [self._rows[row].slot for row in path]
        self._release(row.slot for number, row in self._rows.items() if number not in kept and number not in set(path))
        self._rows = {number: row for number, row in self._rows.items() if number in kept}

    def truncate(self, length: int) -> None:
        """Drop the committed tokens behind the first `length`, and all rows."""
        self._release([*self._order[length:], *(row.slot for row in self._rows.values())])
        del self._order[length:]
        self._rows = {}

    def restart(self, position: int) -> None:
        """Drop all committed tokens: the next one stands at `position`. Rows stay."""
        self._release(self._order)
        self._order, self.origin = [], position

    def fill_mask(self, call: Sequence[CallRow], mask: Single) -> None:
        """Fill (width, capacity + width) `mask` for a call that computes these rows: committed ones, which are the last
        so far, in front of rows of the tree.

        0 at what a row sees, HIDDEN elsewhere: the tokens before it, by their slots or, if they are in the call, by
        their columns behind the slots.
        """
        mask[:] = HIDDEN
        fresh = sum(each.row is None for each in call)
        before = self._order[: self._first(call)]
        columns = {each.row: self._capacity + index for index, each in enumerate(call) if each.row is not None}
        for index, each in enumerate(call):
            mask[index, before] = 0
            mask[index, self._capacity : self._capacity + min(index + 1, fresh)] = 0
            number = each.row
            while number is not None and (row := self._rows.get(number)) is not None:
                mask[index, columns.get(number, row.slot)] = 0
                number = row.parent

    def _first(self, call: Sequence[CallRow]) -> int:
        """Index of the first committed token in the call."""
        return call[0].position - self.origin if call[0].row is None else self.committed

    def _take(self) -> int:
        assert self._free, "committed tokens leave room for the tree"
        return heapq.heappop(self._free)

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)
