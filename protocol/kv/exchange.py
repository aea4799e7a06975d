"""KV between processes: arenas of one model, created with room to grow and adopted only after a check, and blocks
between machines, where a message says where a block belongs, and a raw frame behind it holds the bytes.

Knows no sequences.
"""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from protocol.kv.arena import Arena, LayerRows
from protocol.kv.arena_header import HEADER_BYTES, ArenaLayout
from protocol.kv.segments import SegmentError
from protocol.messages.base import WireRequest
from protocol.messages.kv import KvForm, KvReference
from protocol.messages.remote import MAX_PAYLOAD, KvBlock, Shipment


def kv_form(layout: ArenaLayout) -> KvForm:
    return KvForm(layout.layers, layout.kv_heads, layout.head_size, int(layout.dtype))


def row_bytes(form: KvForm, element_bytes: int) -> int:
    """Bytes of one token in one layer's keys, or equally its values."""
    return form.kv_heads * form.head_size * element_bytes


def shipments(
    sequence: WireRequest, attempt: int, begin: int, keys: LayerRows, values: LayerRows
) -> Iterator[Shipment]:
    """The blocks of one or more rows; `keys` and `values` hold (kv heads, rows, head size) for each layer."""
    layers = [*keys, *values]
    heads, count, size = layers[0].shape
    most = max(1, MAX_PAYLOAD // (heads * size * layers[0].dtype.itemsize))
    for start in range(0, count, most):
        stop = min(count, start + most)
        for layer, rows in enumerate(layers):
            payload = np.ascontiguousarray(rows[:, start:stop]).tobytes()
            yield Shipment(KvBlock(sequence, attempt, begin + start, stop - start, layer), payload)


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

    def adopt(self, reference: KvReference) -> Arena:
        """The arena of that name, checked. Raises ArenaError or SegmentError."""
        return Arena.adopt(
            reference.name,
            self._layout,
            fingerprint=self.fingerprint,
            epoch=self._epoch,
            tokens=reference.tokens,
        )
