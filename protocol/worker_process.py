"""The loop every worker process runs around its logic: link, death pipe, faults. Knows no model."""

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq

from protocol.codec import Stamp
from protocol.errors import PipelineError
from protocol.link import Link
from protocol.messages import Fault, FromWorker, Hello, Ping, Pong, Shutdown, ToWorker

_IDLE_SECONDS = 1.0


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a worker is told at its start, as the last argument, in JSON."""

    address: str
    epoch: int
    incarnation: int
    life: int | None = None
    """A socket shared with the parent; its end of file means that the parent is gone."""
    engine: str
    model: str
    """Folder of the model; empty for an engine that needs none."""
    cores: tuple[int, ...] = ()
    """Processor cores to stay on, where the OS allows; empty for all."""
    prefill_chunk: int = 512
    """Tokens evaluated in one forward while prefilling; other messages are read in between."""
    owner: int | None = None
    """Process whose end makes this worker's shared memory garbage; None to keep no KV there."""

    @classmethod
    def from_arguments(cls) -> "WorkerSetup":
        return msgspec.json.decode(sys.argv[-1], type=cls)


class Worker(Protocol):
    """A worker's logic: messages in, messages out. Replies are sent one by one as they are yielded,
    so what follows a `yield` happens after the sending."""

    def hello(self) -> Hello: ...

    def handle(self, message: ToWorker) -> Iterable[FromWorker]: ...

    @property
    def has_work(self) -> bool: ...

    def work(self) -> Iterable[FromWorker]:
        """One unit of work: a prefill chunk, a growth step, a verification."""
        ...


def serve(setup: WorkerSetup, build: Callable[[], Worker]) -> int:
    """Load, introduce, work until told to stop. Returns the exit code of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if setup.life is not None:
        _die_with_parent(setup.life)
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    context = zmq.Context[zmq.Socket[bytes]]()
    link = Link(context, setup.address, Stamp(setup.epoch, setup.incarnation), ToWorker)
    try:
        worker = build()
        link.send(worker.hello())
        gc.collect()
        gc.freeze()
        gc.disable()
        run(worker, link)
        return 0
    except PipelineError as error:
        link.send(Fault(kind="fatal", text=str(error)))
        return 1
    except Exception as error:  # noqa: BLE001 - the border: the parent is told, whatever it was
        traceback.print_exc()
        link.send(Fault(kind="fatal", text=f"{type(error).__name__}: {error}"[:4000]))
        return 1
    finally:
        link.close()
        context.term()


def run(worker: Worker, link: Link) -> None:
    """Read what has arrived, do one unit of work, repeat; sleep only when there is nothing to do."""
    while True:
        messages = link.receive(0 if worker.has_work else _IDLE_SECONDS)
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Ping):
                link.send(Pong(message.sent))
                continue
            for reply in worker.handle(message):
                link.send(reply)
        if worker.has_work:
            for reply in worker.work():
                link.send(reply)
        elif not messages:
            gc.collect()


def _die_with_parent(life: int) -> None:
    """End this process at once when the parent's end of `life` closes, however the parent ended."""

    def watch() -> None:
        while os.read(life, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="death-pipe").start()
