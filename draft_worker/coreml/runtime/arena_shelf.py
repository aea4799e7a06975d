"""The caches of one engine's sequences, in shared memory, so that a restarted worker finds them. Knows no model.

A cache that a sequence gives back is used again and never let go of, because Core ML may still hold on to it.
"""

import logging

import numpy as np

from draft_worker.coreml.arrays import Single
from draft_worker.coreml.package import Package
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError, ArenaLayout, ArenaMismatch, ElementType
from protocol.kv.exchange import KvExchange
from protocol.kv.segments import SegmentError
from protocol.messages.worker import KvReference

_EVERY = 32
"""Committed tokens from one save to the next: fewer are prefilled in one call."""
log = logging.getLogger(__name__)


def layout_of(package: Package) -> ArenaLayout:
    """fp32, since that is what a call's input has to be."""
    shape = package.shape
    return ArenaLayout(shape.layers, shape.key_heads, package.context, shape.head, ElementType.FLOAT32)


class HeldCache:
    """One sequence's cache: an array in the package's layout, and the arena that it is the body of."""

    def __init__(self, array: Single, arena: Arena | None) -> None:
        self.array = array
        self.arena = arena
        self.saved = 0
        """Committed tokens of which the arena says that they are whole."""

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return 0 if self.arena is None else self.arena.layout.segment_bytes

    def save(self, committed: int) -> KvReference | None:
        """Declare the committed tokens' rows whole, if there are enough new ones; where they are."""
        if self.arena is None or committed - self.saved < _EVERY:
            return None
        self.arena.commit(committed)
        self.saved = committed
        return KvReference(self.arena.name, committed)

    def cut(self, committed: int) -> None:
        """Rows behind so many tokens are about to change."""
        if self.arena is not None and committed < self.arena.committed:
            self.arena.commit(committed)
        self.saved = min(self.saved, committed)


class ArenaShelf:
    """Takes arenas from an exchange; without one, caches are memory of this process alone."""

    def __init__(self, package: Package, exchange: KvExchange | None) -> None:
        self._shape = package.cache_shape
        self._layout = layout_of(package)
        self._exchange = exchange
        self._free: list[HeldCache] = []

    def take(self) -> HeldCache:
        """A cache whose rows mean nothing."""
        if self._free:
            return self._free.pop()
        if self._exchange is not None:
            try:
                return self._held(self._exchange.create(self._layout.capacity))
            except SegmentError as error:
                log.warning("a sequence is not kept for a restart: %s", error)
        return HeldCache(np.zeros(self._shape, np.float32), None)

    def adopt(self, reference: KvReference) -> HeldCache:
        """The cache that a worker before this one left. Raises ArenaError or SegmentError."""
        if self._exchange is None:
            raise ArenaError("This draft shares no KV: prefill again.")
        arena = self._exchange.adopt(reference)
        if arena.layout != self._layout:
            arena.close()
            raise ArenaMismatch(f"KV arena {arena.name} has {arena.layout.capacity:,} slots: prefill again.")
        held = self._held(arena)
        held.saved = arena.committed
        return held

    def give_back(self, held: HeldCache) -> None:
        held.cut(0)
        self._free.append(held)

    def _held(self, arena: Arena) -> HeldCache:
        return HeldCache(arena.body, arena)


def exchange_of(package: Package, epoch: int, owner: int | None) -> KvExchange | None:
    """What this package's caches are known by; None if nobody is to own them."""
    if owner is None:
        return None
    return KvExchange(layout_of(package), fingerprint=package.encode(), epoch=epoch, owner=owner)
