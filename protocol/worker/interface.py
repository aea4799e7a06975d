"""The interface between a worker's logic and the loop that runs it."""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from protocol.messages.features import FeatureShipment
from protocol.messages.remote import Shipment
from protocol.messages.worker import FromWorker, Hello, ToWorker

WorkerReply: TypeAlias = FromWorker | Shipment | FeatureShipment


class Worker(Protocol):
    """A worker's logic: messages in, messages out. Each reply is sent when it is yielded, so code after a `yield`
    runs after the sending."""

    def hello(self) -> Hello: ...

    def handle(self, message: ToWorker) -> Iterable[WorkerReply]:
        """A draft on another machine that reads features gets FeatureShipments, too."""
        ...

    @property
    def has_work(self) -> bool: ...

    def work(self) -> Iterable[WorkerReply]:
        """One unit of work: a prefill chunk, a growth step, a verification."""
        ...
