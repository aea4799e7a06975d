"""Which committed tokens of one sequence have rows, and which rows are due.

A row reads the true feature of the token before it, or the output of the row before in its place: the row of the token
at index i reads the feature of token i - 1. Pure: knows no network and no KV.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Feature: TypeAlias = NDArray[np.float32]

MOST_OWN = 16
"""So many committed tokens without rows and features get rows from the drafter's own outputs, one forward each."""
_RECENT = 64
"""Features of so many last tokens are kept after their use: rows behind a late one are computed again."""


class Due(NamedTuple):
    """Rows of the committed tokens from index `first` on are to be computed."""

    first: int
    anew: bool = False
    """The rows in front of them are dropped."""


class CommittedRows:
    """Which committed tokens have rows, which of the rows read true features, and which is due next.

    Token 0 has a row only if it was a root.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.start = 0
        """The first token with a row."""
        self.end = 0
        """Behind the last token with a row; `start` if none has."""
        self.newest = -1
        """The last token whose feature was fed."""
        self.inputs: dict[int, Any] = {}
        """By token: what its row read in place of a feature."""
        self._features: dict[int, Feature] = {}
        self._settled = 0
        """Rows of the tokens below this one stay: features of theirs are gone."""

    def feed(self, first: int, rows: Feature) -> None:
        """Features of the tokens from index `first` on."""
        for token, row in enumerate(rows[: max(0, len(self.tokens) - first)], start=first):
            self._features[token] = row
            self.newest = max(self.newest, token)

    def feature(self, token: int) -> Feature | None:
        """What the row of this token reads; None: it is not there."""
        return self._features.get(token - 1)

    @property
    def due(self) -> Due | None:
        """None: no row is to be computed, or no more can be before features come (`blocked`)."""
        if self.end > self.start:
            back = self._readable_back_to(self.start)
            if back < self.start >= self._settled:
                return Due(back, anew=True)
            late = [token for token in self.inputs if token >= self._settled and token - 1 in self._features]
            if late:
                return Due(min(late))
        missing = self._missing
        if missing >= len(self.tokens):
            return None
        if missing - 1 in self._features:
            return Due(missing, anew=self.end == self.start)
        fresh = min((each + 1 for each in self._features if each >= missing), default=len(self.tokens))
        if fresh - missing <= MOST_OWN:
            return Due(missing, anew=self.end == self.start)
        return Due(fresh, anew=True) if fresh < len(self.tokens) else None

    @property
    def blocked(self) -> bool:
        """Whether so many tokens lack rows and features that nothing can be guessed behind them."""
        return self.due is None and self._missing < len(self.tokens)

    @property
    def waiting(self) -> int:
        """Committed tokens from the first one on whose row can be computed from a true feature."""
        due = self.due
        return 0 if due is None or self.feature(due.first) is None else len(self.tokens) - due.first

    def readable(self, first: int, most: int) -> int:
        """How many tokens from `first` on, at most so many, have a feature each."""
        count = 0
        while count < most and first + count < len(self.tokens) and first + count - 1 in self._features:
            count += 1
        return count

    def restart(self, start: int) -> None:
        """No token has a row; the first one with a row will be `start`."""
        self.start = self.end = start
        self.inputs = {}

    def computed(self, end: int) -> None:
        """The tokens up to `end` have rows, and those behind have none."""
        self.end = end
        self.inputs = {token: read for token, read in self.inputs.items() if token < end}
        for token in [each for each in self._features if each < min(end - 1, len(self.tokens) - _RECENT)]:
            del self._features[token]
            self._settled = max(self._settled, token + 2)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.end = max(self.start, min(self.end, length))
        self.newest = min(self.newest, length - 1)
        self._settled = min(self._settled, self.end)
        self.inputs = {token: read for token, read in self.inputs.items() if token < self.end}
        self._features = {token: each for token, each in self._features.items() if token < length}

    def copy(self, length: int) -> "CommittedRows":
        other = CommittedRows()
        other.tokens, other.start, other.end, other.newest = list(self.tokens), self.start, self.end, self.newest
        other.inputs, other._features, other._settled = dict(self.inputs), dict(self._features), self._settled
        other.truncate(length)
        return other

    @property
    def memory(self) -> int:
        """Bytes of features."""
        return sum(each.nbytes for each in self._features.values())

    @property
    def _missing(self) -> int:
        """The first token that has no row and needs one."""
        return self.end if self.end > self.start else 1

    def _readable_back_to(self, token: int) -> int:
        """The first token from which on all up to `token` have features."""
        while token > 1 and token - 2 in self._features:
            token -= 1
        return token
