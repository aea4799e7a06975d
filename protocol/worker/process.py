"""The loop every worker process runs around its logic: link, death pipe, faults. Knows no model."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import PipelineError
from protocol.messages.base import Role, plain
from protocol.messages.worker import Fault, Ping, Pong, Shutdown, ToWorker
from protocol.security.keys import own_keys
from protocol.transport.codec import Stamp
from protocol.transport.link import Link
from protocol.worker.interface import Worker
from protocol.worker.pacing import DevicePace
from protocol.worker.replay import replay, settle
from protocol.worker.tracing import traced

_IDLE_SECONDS = 1.0


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a worker is told at its start, as the last argument, in JSON."""

    address: str
    epoch: int
    incarnation: int
    server: str = ""
    """The orchestrator's public key, Z85, if it is on another machine."""
    keys: str = ""
    """Folder with the keys of this machine, for the same case."""
    patience: float | None = None
    """Seconds without a word from the orchestrator after which it is taken for gone; None to wait for ever."""
    life: int | None = None
    """A socket shared with the parent; its end of file means that the parent is gone."""
    engine: str
    model: str
    """Folder of the model; empty for an engine that needs none."""
    source: str = ""
    """Folder of the model that a conversion in `model` stands in for, where that matters."""
    cores: tuple[int, ...] = ()
    """Processor cores to stay on, where the OS allows; empty for all."""
    prefill_chunk: int = 512
    """Tokens evaluated in one forward while prefilling; other messages are read in between."""
    owner: int | None = None
    """Process whose end makes this worker's shared memory garbage; None to keep no KV there."""
    prefix_cache: int = 0
    """MiB of this worker's own memory for KV of sequences that have ended."""
    pace: DevicePace | None = None
    """The device to be as slow as; None for the speed of this one."""
    hosts: TargetHosts | None = None
    """Those that a target is divided among; this process is their rank 0."""
    trace: str = ""
    """Folder to write spans to at the end; empty records none."""
    replay: str = ""
    """A script of a traced worker to run alone, instead of serving anybody."""

    @classmethod
    def from_arguments(cls) -> "WorkerSetup":
        return msgspec.json.decode(sys.argv[-1], type=cls)


def serve(setup: WorkerSetup, build: Callable[[], Worker]) -> int:
    """Load, introduce, work until told to stop. Returns the exit code of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is nothing to tidy up yet, and libraries that are being imported swallow SystemExit.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if setup.life is not None:
        die_with_parent(setup.life)
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    if setup.replay:
        replay(build, Path(setup.replay), Path(setup.trace))
        return 0
    context = zmq.Context[zmq.Socket[bytes]]()
    link = _connect(context, setup)
    try:
        worker = build()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        hello = worker.hello()
        link.send(hello)
        settle()
        _leave_setup(setup, hello.role)
        with traced(worker, setup.trace, f"{hello.role}-{setup.incarnation}") as watched:
            run(watched, link, setup.patience)
        return 0
    except PipelineError as error:
        link.send(Fault(kind="fatal", text=plain(str(error))))
        return 1
    except Exception as error:  # noqa: BLE001 - the border: the parent is told, whatever it was
        traceback.print_exc()
        link.send(Fault(kind="fatal", text=plain(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        link.close()
        context.term()


def _connect(context: zmq.Context[zmq.Socket[bytes]], setup: WorkerSetup) -> Link:
    keys = own_keys(Path(setup.keys)) if setup.keys else None
    stamp = Stamp(setup.epoch, setup.incarnation)
    return Link(context, setup.address, stamp, ToWorker, server=setup.server.encode(), keys=keys)


def _leave_setup(setup: WorkerSetup, role: Role) -> None:
    """A traced worker's set-up is what its replay needs besides its script."""
    if setup.trace:
        (Path(setup.trace) / f"{role}-{setup.incarnation}.setup").write_bytes(msgspec.json.encode(setup))


def run(worker: Worker, link: Link, patience: float | None = None) -> None:
    """Read what has arrived, do one unit of work, repeat; sleep only when there is nothing to do.

    Returns when told to, or when nothing was heard for `patience` seconds.
    """
    heard = time.monotonic()
    while True:
        messages = link.receive(0 if worker.has_work else _IDLE_SECONDS)
        if messages:
            heard = time.monotonic()
        elif patience is not None and time.monotonic() - heard > patience:
            return
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Ping):
                link.send(Pong(message.sent, time.perf_counter_ns()))
                # Trees are cycles. A worker may never be idle, and this takes a millisecond.
                gc.collect()
                continue
            for reply in worker.handle(message):
                link.send(reply)
        if worker.has_work:
            for reply in worker.work():
                link.send(reply)


def die_with_parent(life: int) -> None:
    """End this process at once when the parent's end of `life` closes, however the parent ended."""

    def watch() -> None:
        while os.read(life, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="death-pipe").start()
