"""Takes the KV of a prompt during its prefill: to shared memory, or in blocks to another machine."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from protocol.kv.arena import LayerRows
from protocol.kv.blocks import shipments
from protocol.kv.exchange import KvExchange
from protocol.messages.kv import KvOffer
from protocol.messages.remote import Shipment
from protocol.messages.worker import Prefill


class KvSink(Protocol):
    """Takes the rows of one prompt, in order."""

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        """Take the rows from token `begin` on. Returns the messages to send."""
        ...

    def finish(self, seconds: float) -> Iterable[KvOffer]:
        """The prompt is complete; its prefill took `seconds`. Returns the messages to send."""
        ...

    def drop(self) -> None:
        """The prompt's KV is no longer needed."""
        ...


OpenSink: TypeAlias = Callable[[Prefill], KvSink]
"""Raises SegmentError if there is no shared memory left."""


class ArenaSink:
    """Writes to an arena. From the offer on, the orchestrator must unlink it."""

    def __init__(self, exchange: KvExchange, prefill: Prefill) -> None:
        self._prefill = prefill
        self._arena = exchange.create(len(prefill.tokens))

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        self._arena.write_rows(begin, keys, values)
        self._arena.commit(begin + keys[0].shape[1])
        return ()

    def finish(self, seconds: float) -> Iterable[KvOffer]:
        name, size = self._arena.name, self._arena.layout.segment_bytes
        self._arena.close()
        yield KvOffer(self._prefill.sequence, name, len(self._prefill.tokens), size, seconds)

    def drop(self) -> None:
        self._arena.close()
        self._arena.unlink()


class RemoteSink:
    """Sends blocks for an arena that the orchestrator creates. The last block completes it."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        return shipments(self._prefill.sequence, self._prefill.attempt, begin, keys, values)

    def finish(self, seconds: float) -> Iterable[KvOffer]:
        return ()

    def drop(self) -> None:
        return
