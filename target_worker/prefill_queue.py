"""Whose prompt is read next. Pure; knows no model."""

from collections.abc import Callable, Iterator

from protocol.messages.base import SequenceId


class PrefillQueue:
    """Sequences that have something to read, in turns. One whose prompt begins like that of another one, which came
    earlier and is being read, follows it: it waits until what they share is there to be copied."""

    def __init__(self) -> None:
        self._turns: list[SequenceId] = []
        self._leaders: dict[SequenceId, tuple[SequenceId, int]] = {}
        """Of each that follows: whom, and how many tokens they share."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._turns)

    def add(self, id: SequenceId, leader: SequenceId | None = None, shared: int = 0) -> None:
        """The last in turn; perhaps it follows one that is here."""
        self._turns.append(id)
        if leader is not None:
            self._leaders[id] = leader, shared

    def remove(self, id: SequenceId) -> None:
        """It has read all, or is over; nothing happens if it is not here."""
        self._leaders.pop(id, None)
        if id in self._turns:
            self._turns.remove(id)

    def take(self, held: Callable[[SequenceId], int]) -> tuple[SequenceId, bool]:
        """Whose turn it is, who leaves the order, and whether it has followed another one until now.

        `held`: how many tokens a sequence of this order has read. The one that came first follows nobody.
        """
        for id in self._turns:
            leader, shared = self._leaders.get(id, (None, 0))
            if leader is None or leader not in self._turns or held(leader) >= shared:
                followed = leader is not None
                self.remove(id)
                return id, followed
        raise AssertionError("whoever came first follows nobody")
