"""A target sequence's KV: its first tokens may be adopted from an arena, and it may outlive the sequence.

Knows no requests.
"""

from typing import NamedTuple

from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena_header import ArenaError
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.base import plain
from protocol.messages.kv import KvReference
from target_worker.kv.checkpoint import KvCheckpoint

_ROOM_SHARE = 16
"""One row of room to grow for so many adopted rows, so that the next few tokens need no new array."""


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
