"""A sequence's KV: its first tokens may be adopted from an arena, and what is committed is saved to one, so that it
outlives the sequence and this process. Knows no requests, no messages and no clock.
"""

from threading import Thread
from typing import NamedTuple

from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.base import plain
from protocol.messages.kv import KvReference
from protocol.processes import low_priority

MIN_TOKENS = 32
"""Fewest tokens that are saved: fewer are prefilled in the time that a save takes."""
_INTERVAL = 64
"""Committed tokens from one save to the next."""
_AHEAD = 4 * _INTERVAL
"""Tokens behind those that are saved for which memory is found too."""
_SLICE = 128
_SLICE_BYTES = 8 << 20
"""Tokens copied at once, and their bytes at most. A verification that arrives meanwhile waits for one slice."""
_ROOM_SHARE = 16
"""One row of room to grow for so many adopted rows, so that the next few tokens need no new array."""


class KvCheckpoint:
    """One arena at a time, filled a slice at a time; a bigger one when it is full."""

    def __init__(self, exchange: KvExchange, covered: int = 0) -> None:
        """`covered`: tokens of this sequence whose KV another arena holds already."""
        self.covered = covered
        """Tokens whose KV some arena holds."""
        self._exchange = exchange
        self._arena: Arena | None = None
        self._full: Arena | None = None
        """The arena before this one, until its rows are copied."""
        self._touching: Thread | None = None
        self._touched = 0
        """Rows of the arena for which a thread has found memory, or does."""
        self._goal = 0
        """Tokens that the save in progress will cover; 0 if none is in progress."""
        self.offered = ""
        """The arena that the orchestrator knows."""
        self.closed = False
        """Nothing will be saved any more."""

    @property
    def size(self) -> int:
        """Bytes of shared memory in use."""
        return 0 if self._arena is None else self._arena.layout.segment_bytes

    @property
    def full(self) -> bool:
        """The first tokens that an arena has room for are saved: no more are."""
        return self.saved >= self._exchange.most

    def due(self, committed: int) -> bool:
        """Whether a sequence of so many committed tokens has something to save."""
        most = self._exchange.most
        enough = 1 if committed >= most else _INTERVAL if self.covered else MIN_TOKENS
        return not self.closed and (self._goal > 0 or min(committed, most) - self.covered >= enough)

    def prepared(self, committed: int) -> bool:
        """Whether the rows of so many tokens are to be saved now: the system has found memory for them, which a thread
        of low priority lets it do meanwhile, or it takes too long. Raises SegmentError if there is none."""
        goal = min(committed, self._exchange.most)
        if not self._exchange.touches_ahead:
            return True
        arena, touching = self._with_room(goal), self._touching
        if touching is not None and touching.is_alive():
            return goal >= self._touched - _AHEAD + _INTERVAL
        if goal <= self._touched:
            return True
        begin, self._touched = self._touched, goal + _AHEAD
        self._touching = Thread(target=_touch, args=(arena, begin, self._touched), daemon=True, name="KV, memory")
        self._touching.start()
        return False

    def save(self, cache: TreeSequence) -> KvReference | None:
        """Copy the next slice. Returns the arena once it holds more tokens than were covered before.

        Raises SegmentError if there is no memory for it.
        """
        goal = min(self._goal or cache.committed, cache.committed, self._exchange.most)
        arena = self._with_room(goal)
        layout = arena.layout
        at_once = max(1, min(_SLICE, _SLICE_BYTES * layout.capacity // (2 * layout.half_bytes)))
        begin, end = arena.committed, min(arena.committed + at_once, goal)
        if begin < end:
            end = self._write(arena, cache, begin, end)
            arena.commit(end)
        self._goal = goal if end < goal else 0
        if end <= self.covered:
            return None
        self.covered = end
        return KvReference(arena.name, end)

    def release(self, name: str) -> None:
        """The orchestrator unlinks this arena: if it is this checkpoint's, save nothing more."""
        if self._arena is not None and self._arena.name == name:
            self.close()

    def close(self) -> None:
        """Save nothing more. The offered arena stays, for other sequences."""
        self.closed = True
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._full is not None:
            self._full.close()
            self._full = None

    @property
    def saved(self) -> int:
        """The first tokens that need not be exported again."""
        return max((arena.committed for arena in (self._arena, self._full) if arena is not None), default=0)

    def _write(self, arena: Arena, cache: TreeSequence, begin: int, end: int) -> int:
        """Write tokens from `begin` to `end`, or to an earlier one; where it ends."""
        full = self._full
        if full is None or begin >= full.committed:
            arena.write_rows(begin, *cache.export(begin, end))
            return end
        end = min(end, full.committed)
        arena.write_rows(begin, list(full.keys[:, :, begin:end]), list(full.values[:, :, begin:end]))
        if end == full.committed:
            full.close()
            self._full = None
        return end

    def _with_room(self, tokens: int) -> Arena:
        full = self._arena
        if full is None or tokens > full.layout.capacity:
            self._arena = self._exchange.create(tokens)
            if self._full is not None:
                self._full.close()
            self._full = full
            self._touched = 0
        assert self._arena is not None
        return self._arena


def _touch(arena: Arena, begin: int, end: int) -> None:
    low_priority()
    arena.touch(begin, end)


class TargetKv(NamedTuple):
    """A sequence's KV in this process's memory and, if it is saved there, in shared memory."""

    cache: TreeSequence
    checkpoint: KvCheckpoint | None

    @property
    def memory(self) -> int:
        return self.cache.memory

    @property
    def copyable(self) -> bool:
        return self.cache.copyable

    def reach(self, tokens: int) -> int:
        return self.cache.reach(tokens)

    def shed(self) -> bool:
        return self.cache.shed()

    def shorten(self, tokens: int) -> None:
        self.cache.shorten(tokens)

    def first(self, length: int, exclusive: bool) -> TreeSequence:
        """The KV of the first `length` tokens, to which it can be cut: this KV itself if it is the caller's
        exclusively, else a copy."""
        if not exclusive:
            return self.cache.copy(length)
        self.cache.truncate(length)
        return self.cache

    def close(self) -> None:
        """Save nothing more."""
        if self.checkpoint is not None:
            self.checkpoint.close()


class Adoption(NamedTuple):
    """The KV of `tokens` tokens that a new sequence begins with. Without tokens, `warning` says why."""

    cache: TreeSequence
    tokens: int = 0
    warning: str = ""


def adopt(cache: TreeSequence, exchange: KvExchange | None, reference: KvReference) -> Adoption:
    """Copy an arena's rows into the empty `cache`. An arena that can't be adopted gives a warning and costs a
    prefill."""
    if exchange is None:
        return Adoption(cache, warning="This target shares no KV: prefill again.")
    try:
        arena = exchange.adopt(reference)
    except (ArenaError, SegmentError) as error:
        return Adoption(cache, warning=plain(str(error)))
    rows = min(arena.layout.capacity, reference.tokens + reference.tokens // _ROOM_SHARE)
    keys, values = list(arena.keys[:, :, :rows]), list(arena.values[:, :, :rows])
    cache.adopt(keys, values, reference.tokens, arena.layout.dtype)
    del keys, values
    arena.close()
    return Adoption(cache, reference.tokens)
