"""The caches of one engine's sequences, in shared memory for adoption by a restarted worker. Knows no model.

The pool reuses released caches and never frees them, because Core ML may still refer to them.
"""

import logging

import numpy as np

from draft_worker.coreml.arrays import Single
from draft_worker.coreml.package import Package
from draft_worker.coreml.runtime.memory import HostMemory
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError, ArenaLayout, ArenaMismatch, ElementType
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.kv import KvReference

_SAVE_INTERVAL = 32
"""Committed tokens between two saves. A restarted worker prefills fewer in one call."""
log = logging.getLogger(__name__)


def layout_of(package: Package) -> ArenaLayout:
    """The layout of the package's caches: fp32, the required type of a call's input."""
    rows, key_heads, context, head = package.host_shape
    return ArenaLayout(rows // 2, key_heads, context, head, ElementType.FLOAT32)


class SequenceCache:
    """The cache of one sequence: an array in `Package.host_shape`, which is the body of `arena` if there is one."""

    def __init__(self, array: Single, arena: Arena | None, kv_rows: int) -> None:
        self.array = array
        self.kv = array[:kv_rows]
        """The keys and values: one view for the life of the cache, because calls get it."""
        self.arena = arena
        self.saved = 0
        """Committed tokens that the arena declares adoptable."""

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return 0 if self.arena is None else self.arena.layout.segment_bytes

    def save(self, committed: int) -> KvReference | None:
        """Declare the rows of the committed tokens adoptable and return their place, if enough of them are new."""
        if self.arena is None or committed - self.saved < _SAVE_INTERVAL:
            return None
        self.arena.commit(committed)
        self.saved = committed
        return KvReference(self.arena.name, committed)

    def truncate(self, committed: int) -> None:
        """Declare that only the rows of the first `committed` tokens stay unchanged."""
        if self.arena is not None and committed < self.arena.committed:
            self.arena.commit(committed)
        self.saved = min(self.saved, committed)


class CachePool:
    """Creates arenas through `exchange`. Without an exchange, caches are private memory of this process."""

    def __init__(self, package: Package, exchange: KvExchange | None) -> None:
        self._package = package
        self._shape = package.host_shape
        self._kv_rows = package.cache_shape[0]
        self._layout = layout_of(package)
        self._exchange = exchange
        self._free: list[SequenceCache] = []

    def acquire(self) -> SequenceCache:
        """A cache with undefined rows."""
        if self._free:
            return self._free.pop()
        if self._exchange is not None:
            try:
                arena = self._exchange.create(self._layout.capacity)
                return SequenceCache(arena.body, arena, self._kv_rows)
            except SegmentError as error:
                log.warning("the KV of a sequence will not survive a restart: %s", error)
        return SequenceCache(np.zeros(self._shape, np.float32), None, self._kv_rows)

    def adopt(self, reference: KvReference) -> SequenceCache:
        """The cache of an earlier life of the worker. Raises ArenaError or SegmentError."""
        if self._exchange is None:
            raise ArenaError("This draft shares no KV: prefill again.")
        arena = self._exchange.adopt(reference)
        if arena.layout != self._layout:
            arena.close()
            raise ArenaMismatch(f"KV arena {arena.name} has {arena.layout.capacity:,} slots: prefill again.")
        cache = SequenceCache(arena.body, arena, self._kv_rows)
        cache.saved = arena.committed
        return cache

    def memory(self, cache: SequenceCache) -> HostMemory:
        """The cache as the memory of a new sequence."""
        return HostMemory(self._package, cache.array, cache.kv)

    def release(self, cache: SequenceCache) -> None:
        cache.truncate(0)
        self._free.append(cache)


def exchange_of(package: Package, epoch: int, owner: int | None) -> KvExchange | None:
    """The exchange for this package's caches; None without an owner."""
    if owner is None:
        return None
    return KvExchange(layout_of(package), fingerprint=package.encode(), epoch=epoch, owner=owner)
