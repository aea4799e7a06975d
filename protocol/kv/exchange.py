"""The arenas of one model in one run of the pipeline: created with room to grow, adopted only after a check.

Knows no sequences, and of messages only KvForm and KvReference.
"""

from dataclasses import replace

from protocol.kv.arena import Arena
from protocol.kv.arena_header import HEADER_BYTES, ArenaLayout
from protocol.kv.blocks import kv_form
from protocol.kv.segments import SegmentError
from protocol.messages.kv import KvForm, KvReference

_MIN_ROOM = 512
"""Fewest tokens of room to grow."""


class KvExchange:
    """Creates and adopts arenas, for a process that shares KV with others of its pipeline."""

    def __init__(
        self, layout: ArenaLayout, *, fingerprint: str, epoch: int, owner: int, limit: int | None = None
    ) -> None:
        """`layout` has the model's context as capacity; `owner` is the process after whose end arenas are unlinked.
        `limit`: most bytes of one arena, since more would be unlinked at once; None for no bound."""
        self._layout = layout
        self.fingerprint = fingerprint
        self._epoch = epoch
        self._owner = owner
        rows = layout.segment_bytes - HEADER_BYTES
        share = 1.0 if limit is None else min(1.0, max(0, limit - HEADER_BYTES) / rows)
        self.most = int(layout.capacity * share)
        """Tokens of the largest arena."""
        self.touches_ahead = False
        """A thread finds memory for rows while the caller still computes: see `KvCheckpoint.prepared`."""

    @property
    def form(self) -> KvForm:
        return kv_form(self._layout)

    def create(self, tokens: int) -> Arena:
        """A new arena for `tokens` tokens and half as many again, at least 512. Raises SegmentError."""
        if tokens > self.most:
            raise SegmentError(f"The KV of {tokens:,} tokens is larger than the memory for arenas allows.")
        capacity = min(self.most, tokens + max(_MIN_ROOM, tokens // 2))
        layout = replace(self._layout, capacity=capacity)
        return Arena.create(layout, fingerprint=self.fingerprint, epoch=self._epoch, owner=self._owner)

    def adopt(self, reference: KvReference, *, deeper: bool = False) -> Arena:
        """The arena of that name, checked; if `deeper`, it may have more layers. Raises ArenaError or SegmentError."""
        return Arena.adopt(
            reference.name,
            self._layout,
            fingerprint=self.fingerprint,
            epoch=self._epoch,
            tokens=reference.tokens,
            deeper=deeper,
        )
