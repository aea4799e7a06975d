"""A worker that goes on after an allocation failed: the sequences at work end or begin again, the others stay."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from protocol.messages.worker import Hello, ToWorker
from protocol.worker.interface import Worker, WorkerReply

_SHORTAGE = re.compile(
    r"unable to allocate|maximum allowed buffer size|insufficient memory|out ?of ?memory|resource limit", re.IGNORECASE
)
"""What MLX says on a processor, of a buffer on Metal, and of a command that Metal could not run."""


class Frugal(Worker, Protocol):
    """A worker that can do without some of its sequences."""

    def run_short(self) -> Iterable[WorkerReply]:
        """Memory ran out in the call before, so that the KV of the sequences at work may be torn: free them and what
        can be spared, and say so."""
        ...


class SurvivingWorker:
    """Behaves as `worker`, and frees memory where that ran out."""

    def __init__(self, worker: Frugal) -> None:
        self._worker = worker

    def hello(self) -> Hello:
        return self._worker.hello()

    @property
    def has_work(self) -> bool:
        return self._worker.has_work

    def handle(self, message: ToWorker) -> Iterator[WorkerReply]:
        return self._answered(lambda: self._worker.handle(message))

    def work(self) -> Iterator[WorkerReply]:
        return self._answered(self._worker.work)

    def _answered(self, call: Callable[[], Iterable[WorkerReply]]) -> Iterator[WorkerReply]:
        try:
            yield from call()
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
        else:
            return
        # Behind the handler, since an exception holds what the failed call held.
        yield from self._worker.run_short()


def is_shortage(error: Exception) -> bool:
    """Whether an allocation failed."""
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None
