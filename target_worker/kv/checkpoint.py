"""A sequence's committed KV in shared memory, so that it outlives this process. Knows no messages and no clock."""

from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena import Arena
from protocol.kv.exchange import KvExchange
from protocol.messages.worker import KvReference

_LEAST = 32
"""Tokens that are worth an arena: fewer are prefilled in the time that it takes."""
_EVERY = 64
"""Committed tokens from one save to the next."""
_SLICE = 128
"""Tokens copied at once: a verification that arrives meanwhile waits no longer than that."""


class KvCheckpoint:
    """One arena at a time, filled a slice at a time; a bigger one when it is full."""

    def __init__(self, exchange: KvExchange, covered: int = 0) -> None:
        """`covered`: tokens of this sequence whose KV lies in an arena of somebody else."""
        self.covered = covered
        """Tokens whose KV lies in some arena."""
        self._exchange = exchange
        self._arena: Arena | None = None
        self._goal = 0
        """Tokens that the save in progress will hold; 0 when none is."""
        self._given_up = False

    @property
    def given_up(self) -> bool:
        """Nothing will be saved any more."""
        return self._given_up

    @property
    def size(self) -> int:
        """Bytes of shared memory in use."""
        return 0 if self._arena is None else self._arena.layout.segment_bytes

    def due(self, committed: int) -> bool:
        """Whether a sequence of so many committed tokens has something to save."""
        enough = _EVERY if self.covered else _LEAST
        return not self._given_up and (self._goal > 0 or committed - self.covered >= enough)

    def save(self, cache: TreeSequence) -> KvReference | None:
        """Copy the next slice; where it lies, once the arena holds more than was covered before.

        Raises SegmentError if there is no memory for it.
        """
        goal = min(self._goal or cache.committed, cache.committed)
        arena = self._with_room(goal)
        begin, end = arena.committed, min(arena.committed + _SLICE, goal)
        if begin < end:
            arena.write_rows(begin, *cache.export(begin, end))
            arena.commit(end)
        self._goal = goal if end < goal else 0
        if end <= self.covered:
            return None
        self.covered = end
        return KvReference(arena.name, end)

    def release(self, name: str) -> None:
        """The orchestrator has no use for the arena of this name: make no other one if it is ours."""
        if self._arena is not None and self._arena.name == name:
            self.close()

    def close(self) -> None:
        """Save nothing more. What was offered stays, for others."""
        self._given_up = True
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _with_room(self, tokens: int) -> Arena:
        full = self._arena
        if full is None or tokens > full.layout.capacity:
            self._arena = self._exchange.create(tokens)
            if full is not None:
                full.close()
        assert self._arena is not None
        return self._arena
