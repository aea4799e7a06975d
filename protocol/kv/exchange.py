"""The arenas of one model in one life of the pipeline: made with room to grow, adopted only if they are its own.

Knows no sequences and no messages but the reference.
"""

from dataclasses import replace

from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaLayout
from protocol.kv.blocks import kv_form
from protocol.messages.worker import KvForm, KvReference

_ROOM = 512
"""Tokens beyond those that are known, at least."""


class KvExchange:
    """What a process has to know to share KV with others of its pipeline."""

    def __init__(self, layout: ArenaLayout, *, fingerprint: str, epoch: int, owner: int) -> None:
        """`layout` with the model's context as capacity; `owner` is the process whose end makes arenas garbage."""
        self._layout = layout
        self.fingerprint = fingerprint
        self._epoch = epoch
        self._owner = owner

    @property
    def form(self) -> KvForm:
        return kv_form(self._layout)

    def create(self, tokens: int) -> Arena:
        """A new arena for `tokens` tokens and half as many again, at least 512. Raises SegmentError."""
        capacity = min(self._layout.capacity, tokens + max(_ROOM, tokens // 2))
        layout = replace(self._layout, capacity=capacity)
        return Arena.create(layout, fingerprint=self.fingerprint, epoch=self._epoch, owner=self._owner)

    def adopt(self, reference: KvReference) -> Arena:
        """The arena of that name, checked. Raises ArenaError or SegmentError."""
        return Arena.adopt(
            reference.name,
            self._layout,
            fingerprint=self.fingerprint,
            epoch=self._epoch,
            tokens=reference.tokens,
        )
