"""Where the KV of a prompt goes as it is read: into shared memory, or in blocks to another machine."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from protocol.kv.arena import LayerRows
from protocol.kv.blocks import shipments
from protocol.kv.exchange import KvExchange
from protocol.messages.remote import Shipment
from protocol.messages.worker import KvOffer, Prefill


class Outlet(Protocol):
    """Takes the rows of one prompt in their order."""

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        """Rows from token `begin` on; what is to be sent."""
        ...

    def done(self, seconds: float) -> Iterable[KvOffer]:
        """The prompt is read."""
        ...

    def drop(self) -> None:
        """Nobody wants it any more."""
        ...


OpenOutlet: TypeAlias = Callable[[Prefill], Outlet]
"""Raises SegmentError without memory."""


class ArenaOutlet:
    """An arena, which is the orchestrator's to unlink from the offer on."""

    def __init__(self, exchange: KvExchange, asked: Prefill) -> None:
        self._asked = asked
        self._arena = exchange.create(len(asked.tokens))

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        self._arena.write_rows(begin, keys, values)
        self._arena.commit(begin + keys[0].shape[1])
        return ()

    def done(self, seconds: float) -> Iterable[KvOffer]:
        name, size = self._arena.name, self._arena.layout.segment_bytes
        self._arena.close()
        yield KvOffer(self._asked.sequence, name, len(self._asked.tokens), size, seconds)

    def drop(self) -> None:
        self._arena.close()
        self._arena.unlink()


class RemoteOutlet:
    """Blocks for an arena that the orchestrator makes; the last one ends it."""

    def __init__(self, asked: Prefill) -> None:
        self._asked = asked

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        return shipments(self._asked.sequence, self._asked.attempt, begin, keys, values)

    def done(self, seconds: float) -> Iterable[KvOffer]:
        return ()

    def drop(self) -> None:
        return
