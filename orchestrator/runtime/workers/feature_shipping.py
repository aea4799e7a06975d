"""Sends the target's features to drafts on other machines: read from this machine's rings, and sent as blocks.

A draft acknowledges its blocks by the answer to a Ping behind them.
"""

import time

from orchestrator.runtime.workers.remote_registry import RemoteWorker
from protocol.features.outlet import FeatureOutlet
from protocol.messages.base import SequenceId
from protocol.messages.features import Features
from protocol.messages.worker import Ping, Pong
from protocol.transport.codec import Stamp
from protocol.transport.hub import Hub


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

    def _ship(self, worker: RemoteWorker, outlet: FeatureOutlet) -> None:
        """Send the blocks that are due. Those for which the queue has no room are lost."""
        stamp = Stamp(self._epoch, worker.incarnation)
        due = outlet.due()
        queued = sum(self._hub.ship(worker.peer, shipment, stamp) for shipment in due.blocks)
        ping = Ping(time.perf_counter())
        if queued and self._hub.send(worker.peer, ping, stamp):
            due.sent(queued, ping.sent)
