"""A draft that reads features, behind an engine that checks what it is fed; and features that say whose they are."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from draft_worker.engine_interface import Batch
from protocol.messages.features import FeatureForm
from protocol.messages.sampling import Sampling
from protocol.speculation.token_tree import Candidates
from tests.support.fake_draft import FakeEngine, FakeSequence

FORM = FeatureForm((1, 4), 2)
_RIDERS = 16
"""So many fed tokens need no forward of their own."""


def features(first: int, tokens: Sequence[int], outputs: Sequence[int]) -> NDArray[np.float32]:
    """Of `tokens`, which begin at the position `first`: each output of a token is (position, token + 1000 * output)."""
    rows = [
        [value for output in outputs for value in (position, token + 1000 * output)]
        for position, token in enumerate(tokens, start=first)
    ]
    return np.array(rows, np.float32).reshape(len(rows), 2 * len(outputs))


class ConditionedFake(FakeSequence):
    """Features of any other token than the one that they are fed for fail here, and so do features that come twice."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: dict[int, int] = {}
        """Of the fed tokens: the position in the conversation by the index in the prefix."""
        self._waiting = 0
        self.reads: list[int] = []
        """Tokens of each `read`."""
        self.stale_steps: list[int] = []
        """Staleness of each growth step."""

    def feed(self, first: int, rows: NDArray[np.float32]) -> None:
        assert rows.dtype == np.float32
        assert len(rows) > 0
        assert self._fed_end <= first <= first + len(rows) <= len(self.prefix)
        position = round(float(rows[0, 0]))
        assert np.array_equal(rows, features(position, self.prefix[first : first + len(rows)], FORM.outputs))
        self.positions |= {first + i: position + i for i in range(len(rows))}
        self._waiting += len(rows)

    @property
    def unread(self) -> bool:
        return self._waiting > _RIDERS

    def read(self, most: int) -> int:
        assert self.unread
        self.reads.append(min(most, self._waiting))
        self._waiting -= self.reads[-1]
        return self.reads[-1]

    @property
    def staleness(self) -> int:
        return len(self.prefix) - self._fed_end

    def evaluate(self, batch: Batch) -> list[Candidates]:
        assert not self.unread
        assert not batch.committed
        self._waiting = 0
        self.stale_steps.append(self.staleness)
        return super().evaluate(batch)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._forget(length)

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> Self:
        other = super().reopen(length, sampling, vocabulary, exclusive=exclusive)
        assert isinstance(other, type(self))
        other.positions = dict(self.positions)
        other.reads, other.stale_steps = [], []
        other._forget(length)
        return other

    @property
    def _fed_end(self) -> int:
        return max(self.positions, default=-1) + 1

    def _forget(self, length: int) -> None:
        self.positions = {index: position for index, position in self.positions.items() if index < length}
        self._waiting = min(self._waiting, length)


class ConditionedEngine(FakeEngine):
    features = FORM

    def open(self, sampling: Sampling, vocabulary: int) -> ConditionedFake:
        self.opened.append(ConditionedFake())
        return self.opened[-1]  # pyright: ignore[reportReturnType]


class FakeRing:
    """A target's ring: features of the tokens in `conversation` that were written and not yet overwritten."""

    form = FORM

    def __init__(self, conversation: list[int], window: int = 1 << 20, first: int = 0) -> None:
        self.conversation = conversation
        self.window = window
        self.begin = first
        self.written = first
        self.damage: Callable[[NDArray[np.float32], int], NDArray[np.float32] | None] = lambda rows, first: rows
        self.reads: list[tuple[int, int]] = []
        self.closed = 0

    @property
    def available(self) -> range:
        return range(max(self.begin, self.written - self.window), self.written)

    def read(self, first: int, count: int, outputs: Sequence[int]) -> NDArray[np.float32] | None:
        self.reads.append((first, count))
        if not self.available.start <= first <= first + count <= self.written:
            return None
        return self.damage(features(first, self.conversation[first : first + count], outputs), first)

    def close(self) -> None:
        self.closed += 1
