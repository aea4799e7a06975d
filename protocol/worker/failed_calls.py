"""A worker that goes on after a call failed: memory ran out, the GPU gave a command up, or a model can do less."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from protocol.errors import PipelineError
from protocol.messages.worker import Hello, ToWorker
from protocol.worker.interface import Worker, WorkerReply

log = logging.getLogger(__name__)
_SHORTAGE = re.compile(
    r"unable to allocate|maximum allowed buffer size|insufficient memory|out ?of ?memory|resource limit", re.IGNORECASE
)
"""What MLX says on a processor, of a buffer on Metal, and of a command that Metal could not run."""
_INTERRUPTION = re.compile(
    r"Command buffer execution failed.*"
    r"(Timeout Error|Impacting ?Interactivity|GPU Hang|victim of GPU error|CallbackError(Timeout|Hang|InnocentVictim))"
)
"""What MLX says (mlx/backend/metal/device.cpp, from 0.32 on as an exception that can be caught) of commands that macOS
ended: they took too long beside others, kept the screen waiting, or another program's fault reset the GPU. The same
command may succeed now. Not "Ignored (for causing prior/excessive GPU errors)": only a new process is heard then."""


class Sparing(Worker, Protocol):
    """A worker that can do without some of its sequences."""

    def run_short(self) -> Iterable[WorkerReply]:
        """Memory ran out in the call before, so that the KV of the sequences at work may be torn: free them and what
        can be spared, and say so."""
        ...

    def run_interrupted(self) -> Iterable[WorkerReply]:
        """The GPU gave up a command. MLX may say so a call late, so that any KV may be torn: free all, and say so."""
        ...


class SurvivingWorker:
    """Behaves as `worker`; frees memory where that ran out, and begins again where the GPU gave up."""

    def __init__(self, worker: Sparing, lower: Callable[[str], Iterable[WorkerReply] | None] = lambda _: None) -> None:
        """`lower`: of a worker that can go on with less after any other error, which it gets as a sentence; what
        follows is done as the replies are read. None: it can't, and the error is raised."""
        self._worker = worker
        self._lower = lower

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
        except PipelineError:
            raise
        except Exception as error:  # the border to model code of mlx-lm, which may raise anything
            if passes(error):
                recovery = self.recovery(is_shortage(error))
            else:
                lowered = self._lower(f"{type(error).__name__}: {error}")
                if lowered is None:
                    raise
                recovery = lowered
            log.warning("a call failed, and its sequences begin again: %s", error)
        else:
            return
        # Behind the handler, since an exception holds what the failed call held.
        yield from recovery

    def recovery(self, short: bool) -> Iterator[WorkerReply]:
        """What follows a call that failed for want of memory (`short`), or because the GPU gave up."""
        yield from self._worker.run_short() if short else self._worker.run_interrupted()


def passes(error: Exception) -> bool:
    """Whether the worker can go on without what the call worked for: memory ran out, or the GPU gave a command up."""
    return is_shortage(error) or _INTERRUPTION.search(str(error)) is not None


def is_shortage(error: Exception) -> bool:
    """Whether an allocation failed."""
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None
