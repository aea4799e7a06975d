"""The contents of KV slots: committed tokens, live tree rows, dead rows. Pure numpy; knows no model.

Tokens are written to slots in the order of evaluation. Attention depends on the mask and not on the order of the keys,
so a dropped row costs little until many slots are dead.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

SlotMask: TypeAlias = npt.NDArray[np.bool_]

PREFIX = -1
"""Parent of a row that directly follows the committed tokens."""


class TreeRow(NamedTuple):
    """An evaluated tree token: its slot, the row before it, and its absolute position."""

    slot: int
    parent: int
    position: int


class Move(NamedTuple):
    """Contents of `slots` (ascending) go to the slots from `begin` on."""

    begin: int
    slots: npt.NDArray[np.int64]


class SlotTable:
    """The slots of one sequence. Row numbers are never reused. Misuse by the caller is asserted against."""

    def __init__(self) -> None:
        self.size = 0
        """Slots in use, dead ones included: the next token goes here."""
        self.committed = 0
        self.origin = 0
        """Position of the first committed token."""
        self.next_row = 0
        self._rows: dict[int, TreeRow] = {}
        self._visible = np.zeros(256, dtype=bool)
        """Slots of committed tokens, which every row sees."""
        self._order = np.zeros(256, dtype=np.int64)
        """The same slots in the tokens' order, which is ascending unless tokens were replaced beside rows."""
        self._last = -1
        """The highest of them."""
        self._tip = PREFIX
        """Row number of the last committed token, if it was a row."""

    @property
    def dead(self) -> int:
        return self.size - self.committed - len(self._rows)

    def row(self, number: int) -> TreeRow:
        return self._rows[number]

    def committed_slots(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Slots of the committed tokens from index `begin` to `end`, in the tokens' order."""
        assert 0 <= begin <= end <= self.committed
        return self._order[begin:end]

    def slot_of(self, position: int) -> int:
        """A slot before which no slot holds a token from `position` on."""
        index = min(position - self.origin, self.committed - 1)
        return int(self.committed_slots(index, self.committed).min()) if index > 0 else 0

    def append(self, count: int) -> None:
        """`count` committed tokens take the next slots. There must be no rows and no dead slots."""
        assert not self._rows, "rows must be dropped before more tokens are committed"
        assert not self.dead, "dead slots must be compacted before more tokens are committed"
        self._commit_next(count)
        self._tip = PREFIX

    def replace(self, first: int, count: int) -> int:
        """`count` committed tokens take the next slots, in place of those from index `first` on; returns their first.

        Rows stay as they are, with their positions. Before more rows are added or kept, the committed tokens must end
        where they ended; without rows they may end anywhere.
        """
        self._cut(first)
        if not self._rows:
            self.size, self._tip = self._last + 1, PREFIX
        self._commit_next(count)
        return self.size - count

    def restart(self, position: int) -> None:
        """Drop all committed tokens: the next one stands at `position`. Rows stay, as for `replace`."""
        self._cut(0)
        self.size = 1 + max((row.slot for row in self._rows.values()), default=-1)
        self.origin = position

    def add(self, parents: Sequence[int]) -> list[TreeRow]:
        """New rows take the next slots and the next row numbers; parents come before their children."""
        self._reserve(self.size + len(parents))
        added: list[TreeRow] = []
        for parent in parents:
            parent = self._tip if parent == PREFIX else parent
            assert parent == self._tip or parent in self._rows, f"row {parent} does not exist"
            position = self.origin + self.committed if parent == self._tip else self._rows[parent].position + 1
            row = TreeRow(self.size, parent, position)
            self._rows[self.next_row] = row
            added.append(row)
            self.next_row += 1
            self.size += 1
        return added

    def continues(self, rows: Sequence[TreeRow]) -> bool:
        """Whether new `rows` are one chain that sees every slot before it, so that a causal mask serves."""
        first = rows[0].position
        plain = rows[0].slot == first and self.origin == 0
        return plain and rows[-1].position == first + len(rows) - 1

    def only_dead_slots_mask(self, parent: int) -> bool:
        """Whether a new row behind `parent` would `continue` if there were no dead slots, of which there are some."""
        place = 0 if parent in (PREFIX, self._tip) else self._rows[parent].position + 1 - self.origin - self.committed
        return self.dead > 0 and self.origin == 0 and place == len(self._rows)

    def mask(self, rows: Sequence[TreeRow]) -> SlotMask:
        """(L, size): each of the newest `rows` sees the committed tokens, its ancestors and itself."""
        seen = np.empty((len(rows), self.size), dtype=bool)
        first = self.next_row - len(rows)
        for index, row in enumerate(rows):
            if row.parent >= first:
                seen[index] = seen[row.parent - first]
            else:
                seen[index] = self._visible[: self.size]
                seen[index, list(self._path(row.parent))] = True
            seen[index, row.slot] = True
        return seen

    def committed_mask(self, first: int) -> SlotMask:
        """(committed - first, size): each committed token from index `first` on sees those up to itself."""
        slots = self.committed_slots(first, self.committed)
        return self._visible[None, : self.size] & (np.arange(self.size) <= slots[:, None])

    def positions(self) -> npt.NDArray[np.int32]:
        """(size,) absolute position of the token in each slot; 0 in dead slots."""
        positions = np.zeros(self.size, dtype=np.int32)
        positions[self._order[: self.committed]] = np.arange(self.origin, self.origin + self.committed)
        for row in self._rows.values():
            positions[row.slot] = row.position
        return positions

    def parent_slots(self, rows: Sequence[TreeRow]) -> tuple[int, ...]:
        """Slot of the row before each of `rows`; -1: the last committed token."""
        return tuple(-1 if row.parent == self._tip else self._rows[row.parent].slot for row in rows)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        """Commit the rows of `path` in order, keep those in `surviving`, drop the others."""
        for number in path:
            row = self._rows.pop(number)
            assert row.parent == self._tip, "a committed path must continue the committed tokens"
            self._visible[row.slot] = True
            self._order[self.committed] = row.slot
            self._last, self._tip = max(self._last, row.slot), number
            self.committed += 1
        self._rows = {number: self._rows[number] for number in sorted(surviving)}
        for row in self._rows.values():
            assert row.parent == self._tip or row.parent in self._rows, "a kept row must have kept ancestors"
        self.size = 1 + max(self._last, *(row.slot for row in self._rows.values()), -1)

    def copy(self) -> "SlotTable":
        """Another table with the same committed tokens in the same slots, and without rows."""
        other = SlotTable()
        other._visible, other._order = self._visible.copy(), self._order.copy()
        other.size, other.committed, other._last = self.size, self.committed, self._last
        other.origin = self.origin
        other.truncate(self.committed)
        return other

    def truncate(self, length: int) -> None:
        """Drop committed tokens from index `length` on, and all rows."""
        assert 0 <= length <= self.committed
        self._cut(length)
        self._rows = {}
        self._tip = PREFIX
        self.size = self._last + 1

    def compact(self) -> Move:
        """Close the gaps of dead slots. The caller must move the contents accordingly."""
        begin = int(np.argmin(self._visible[: self.size]))
        alive = self._visible[begin : self.size].copy()
        alive[[row.slot - begin for row in self._rows.values()]] = True
        slots = np.flatnonzero(alive) + begin
        new = np.full(self.size, -1)
        new[slots] = np.arange(begin, begin + len(slots))
        new[:begin] = np.arange(begin)
        self._rows = {number: row._replace(slot=int(new[row.slot])) for number, row in self._rows.items()}
        self._order[: self.committed] = new[self._order[: self.committed]]
        visible = self._visible[slots]
        self._visible[begin:] = False
        self._visible[begin : begin + len(slots)] = visible
        self._last = int(new[self._last]) if self.committed else -1
        self.size = begin + len(slots)
        return Move(begin, slots)

    def _path(self, number: int) -> Iterator[int]:
        """Slots of row `number` and of its ancestors that are not committed."""
        while number in self._rows:
            row = self._rows[number]
            yield row.slot
            number = row.parent

    def _commit_next(self, count: int) -> None:
        """`count` committed tokens take the next slots."""
        self._reserve(self.size + count)
        self._visible[self.size : self.size + count] = True
        self._order[self.committed : self.committed + count] = np.arange(self.size, self.size + count)
        self.size += count
        self.committed += count
        self._last = max(self._last, self.size - 1) if count else self._last

    def _cut(self, length: int) -> None:
        """Drop committed tokens from index `length` on."""
        self._visible[self._order[length : self.committed]] = False
        self.committed = length
        self._last = int(self._order[:length].max()) if length else -1

    def _reserve(self, size: int) -> None:
        if size > len(self._visible):
            self._visible = np.concatenate([self._visible, np.zeros(size, dtype=bool)])
            self._order = np.concatenate([self._order, np.zeros(size, dtype=np.int64)])
