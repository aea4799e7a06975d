"""Features of the target on their way into a drafter: made safe, in order. Knows no network."""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.float32]

_LARGEST = 6e4
"""Half precision ends at 65,504. States of a healthy model are below."""


class FedRows(NamedTuple):
    """(tokens, width) features of the tokens from index `first` on."""

    first: int
    rows: Rows

    @classmethod
    def none(cls, width: int) -> "FedRows":
        return cls(0, np.zeros((0, width), np.float32))

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def part(self, start: int, stop: int) -> "FedRows":
        """The rows of the tokens `start` to `stop`, as far as they are here."""
        start = min(max(start, self.first), self.end)
        stop = max(start, min(stop, self.end))
        return FedRows(start, self.rows[start - self.first : stop - self.first])

    def before(self, length: int) -> "FedRows":
        """The rows of tokens before index `length`."""
        kept = self.part(self.first, length)
        return kept if len(kept.rows) else FedRows.none(self.rows.shape[1])

    def extended(self, first: int, rows: Rows, most: int) -> "FedRows":
        """The last `most` rows with `rows` from index `first` on, less those that are here. A gap ends what is
        before it."""
        new = FedRows(first, rows).part(self.end, first + len(rows))
        whole = new if new.first > self.end else FedRows(self.first, np.concatenate([self.rows, new.rows]))
        return whole.part(whole.end - most, whole.end)


def safe(rows: Rows) -> Rows:
    """Rows that a network can read: finite, and within half precision."""
    return np.clip(np.nan_to_num(rows, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST), -_LARGEST, _LARGEST)
