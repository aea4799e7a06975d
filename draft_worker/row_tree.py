"""The rows of a draft's tree, for engines that keep more of a row than its KV. Knows no network and no slots."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar


class TokenRow:
    """A row of the tree: its token, and the number of the row before it.

    A parent that is not in the tree any more is the end of the committed prefix.
    """

    def __init__(self, token: int, parent: int) -> None:
        self.token = token
        self.parent = parent


RowT = TypeVar("RowT", bound=TokenRow)


class RowTree(Generic[RowT]):
    """Rows by their numbers, as `EngineSequence` numbers them: in the order in which they were added, for good."""

    def __init__(self) -> None:
        self.next_row = 0
        self._rows: dict[int, RowT] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __getitem__(self, number: int) -> RowT:
        return self._rows[number]

    def get(self, number: int) -> RowT | None:
        """None: a row that was committed, or none at all."""
        return self._rows.get(number)

    def add(self, row: RowT) -> None:
        """Give `row` the next number."""
        self._rows[self.next_row] = row
        self.next_row += 1

    def skip(self, count: int) -> None:
        """Give the next `count` numbers to no row."""
        self.next_row += count

    def path(self, number: int) -> Iterator[RowT]:
        """The row of this number and its ancestors, nearest first, up to the committed prefix."""
        while (row := self._rows.get(number)) is not None:
            yield row
            number = row.parent

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> list[RowT]:
        """Take the rows of `path` out of the tree and return them; drop all others that are not `surviving`."""
        taken = [self._rows[number] for number in path]
        self._rows = {number: self._rows[number] for number in surviving}
        return taken

    def clear(self) -> None:
        self._rows = {}
