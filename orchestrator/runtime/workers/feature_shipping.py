"""Sends the target's features to drafts on other machines: read from this machine's rings, and sent as blocks.

A draft acknowledges its blocks by the answer to a Ping behind them. Until then few of them are under way, so that no
message waits long behind them; what the ring loses meanwhile is never sent.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from orchestrator.runtime.workers.remote_registry import RemoteWorker
from protocol.errors import PipelineError
from protocol.features.blocks import shipments
from protocol.features.ring import FeatureRing
from protocol.features.ring_header import row_elements
from protocol.messages.base import Round, SequenceId
from protocol.messages.features import FeatureForm, Features, FeatureShipment
from protocol.messages.remote import MAX_PAYLOAD
from protocol.messages.worker import Ping, Pong
from protocol.transport.codec import Stamp
from protocol.transport.hub import Hub

_UNDER_WAY = 4
"""Blocks that were not acknowledged: 2 MiB, for which a gigabit link takes 17 ms."""


class FeatureShipping:
    """An outlet for each draft that reads features."""

    def __init__(self, hub: Hub, epoch: int) -> None:
        self._hub = hub
        self._epoch = epoch
        self._outlets: dict[int, FeatureOutlet] = {}
        """By incarnation."""

    def announce(self, worker: RemoteWorker, message: Features) -> None:
        """A ring of this machine holds features of a sequence that the worker serves."""
        if worker.hello is None or worker.hello.features is None:
            return
        outlet = self._outlets.setdefault(worker.incarnation, FeatureOutlet(worker.hello.features))
        outlet.announce(message)
        self._ship(worker, outlet)

    def acknowledge(self, worker: RemoteWorker, pong: Pong) -> None:
        """A worker has handled everything that was sent before this Ping."""
        outlet = self._outlets.get(worker.incarnation)
        if outlet is not None and outlet.acknowledge(pong.sent):
            self._ship(worker, outlet)

    def forget(self, worker: RemoteWorker, sequence: SequenceId) -> None:
        """The worker serves this sequence no longer."""
        outlet = self._outlets.get(worker.incarnation)
        if outlet is not None:
            outlet.forget(sequence)

    def drop(self, worker: RemoteWorker) -> None:
        """The worker is gone."""
        outlet = self._outlets.pop(worker.incarnation, None)
        if outlet is not None:
            outlet.close()

    def _ship(self, worker: RemoteWorker, outlet: "FeatureOutlet") -> None:
        """Send the blocks that are due. Those for which the queue has no room are lost."""
        stamp = Stamp(self._epoch, worker.incarnation)
        due = outlet.due()
        queued = sum(self._hub.ship(worker.peer, shipment, stamp) for shipment in due.blocks)
        ping = Ping(time.perf_counter())
        if queued and self._hub.send(worker.peer, ping, stamp):
            due.sent(queued, ping.sent)


@dataclass(slots=True)
class _Unsent:
    """Features of one sequence that are announced and not sent: at first all that the ring holds."""

    ring: FeatureRing
    round: Round
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class DueBlocks:
    """What an outlet sends now."""

    blocks: list[FeatureShipment]
    _under_way: dict[float, int]
    """Of the outlet."""

    def sent(self, blocks: int, ping: float) -> None:
        """So many of the blocks were sent, and behind them a Ping with this number: they are under way until its
        answer."""
        self._under_way[ping] = blocks


@dataclass(slots=True)
class FeatureOutlet:
    """What one draft gets: the outputs of `form`, of all its sequences."""

    form: FeatureForm
    _unsent: dict[SequenceId, _Unsent] = field(default_factory=dict)
    _under_way: dict[float, int] = field(default_factory=dict)
    """Blocks by the Ping behind them."""

    def announce(self, message: Features) -> None:
        """A ring of this machine holds features. A ring that can't be read is ignored."""
        unsent = self._unsent.get(message.sequence)
        if unsent is None or unsent.ring.name != message.name:
            self.forget(message.sequence)
            try:
                ring = FeatureRing.attach(message.name)
            except PipelineError:
                return
            unsent = self._unsent[message.sequence] = _Unsent(ring, message.round, 0, 0)
        unsent.round = message.round
        unsent.stop = max(unsent.stop, message.first + message.rows)

    def due(self) -> DueBlocks:
        """The blocks for which there is room now. They are returned once, whether or not they are sent."""
        room = _UNDER_WAY - sum(self._under_way.values())
        return DueBlocks(list(islice(self._blocks(), max(0, room))), self._under_way)

    def acknowledge(self, ping: float) -> bool:
        """The draft has answered a Ping. Returns whether it was one behind blocks."""
        answered = [number for number in self._under_way if number <= ping]
        for number in answered:
            del self._under_way[number]
        return bool(answered)

    def forget(self, sequence: SequenceId) -> None:
        """The draft serves this sequence no longer."""
        unsent = self._unsent.pop(sequence, None)
        if unsent is not None:
            unsent.ring.close()

    def close(self) -> None:
        for sequence in list(self._unsent):
            self.forget(sequence)

    def _blocks(self) -> Iterator[FeatureShipment]:
        for sequence, unsent in self._unsent.items():
            yield from self._blocks_of(sequence, unsent)

    def _blocks_of(self, sequence: SequenceId, unsent: _Unsent) -> Iterator[FeatureShipment]:
        ring, outputs = unsent.ring, self.form.outputs
        most = MAX_PAYLOAD // (row_elements(self.form) * ring.layout.element.size)
        while most:
            there = ring.available
            first = max(unsent.first, there.start)
            count = min(unsent.stop, there.stop, first + most) - first
            if count <= 0:
                return
            rows = ring.copied(first, count, outputs)
            unsent.first = first + count if rows is not None or ring.available.start <= first else first
            if rows is not None:
                yield from shipments(sequence, unsent.round, first, self.form, ring.layout.element, rows)
