"""What a worker process runs: the interface between its logic and the loop around it."""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

from protocol.messages.remote import Shipment
from protocol.messages.worker import FromWorker, Hello, ToWorker

WorkerReply: TypeAlias = FromWorker | Shipment


class Worker(Protocol):
    """A worker's logic: messages in, messages out. Replies are sent one by one as they are yielded,
    so what follows a `yield` happens after the sending."""

    def hello(self) -> Hello: ...

    def handle(self, message: ToWorker) -> Iterable[WorkerReply]: ...

    @property
    def has_work(self) -> bool: ...

    def work(self) -> Iterable[WorkerReply]:
        """One unit of work: a prefill chunk, a growth step, a verification."""
        ...
