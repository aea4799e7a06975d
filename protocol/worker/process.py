"""The main loop of every worker process: link, death pipe, faults, cores. Knows no model."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from protocol.contracts.model_folder import UNQUANTIZED, KvBits
from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import PipelineError
from protocol.kv.segments import unlink_owned
from protocol.messages.base import Role, plain
from protocol.messages.features import FeatureBlock
from protocol.messages.worker import Cores, Fault, Ping, Pong, Shutdown, ToWorker
from protocol.processes import QualityOfService, raise_descriptor_limit, set_quality_of_service
from protocol.security.keys import own_keys
from protocol.transport import Link, Stamp
from protocol.worker.interface import Worker
from protocol.worker.pacing import DevicePace
from protocol.worker.tracing import replay, settle, traced

_IDLE_SECONDS = 1.0


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setup of a worker process: its last argument, in JSON."""

    address: str
    epoch: int
    incarnation: int
    server: str = ""
    """The public key of an orchestrator on another machine, Z85; empty on this machine."""
    keys: str = ""
    """Folder with this machine's keys, for an orchestrator on another machine."""
    patience: float | None = None
    """Seconds without a message after which the worker ends; None to wait for ever."""
    life: int | None = None
    """A socket shared with the parent; its end of file means that the parent is gone."""
    engine: str
    model: str
    """Folder of the model; empty for an engine that needs none."""
    target: str = ""
    """Folder of the target's model, of which a trained drafter takes the embedding and the head."""
    cores: tuple[int, ...] = ()
    """Processor cores to run on, if the OS supports it; empty for all."""
    prefill_chunk: int = 512
    """Tokens of one prefill forward; messages are read between two forwards."""
    owner: int | None = None
    """Process whose end makes this worker's shared memory stale; None for no KV in shared memory."""
    arena_memory: int = 0
    """MiB of the largest arena; 0 for no bound."""
    prefix_cache: int = 0
    """MiB of the prefix cache; 0 keeps no KV of ended sequences."""
    kv_pool: int | None = None
    """Bytes of KV of live and ended sequences together, in place of the bound of the prefix cache; None: none."""
    disk_cache: int = 0
    """Bytes of KV of ended sequences on disk; 0 keeps none."""
    kv_bits: KvBits = UNQUANTIZED
    """Of the target's keys and values, as the target and a prefill worker hold them."""
    gpu_share: float = 1.0
    """Of the memory that macOS recommends for the GPU: other processes of the pipeline use the rest."""
    pace: DevicePace | None = None
    """The device to be paced to; None for this machine's own speed."""
    texts: str = ""
    """File of recorded texts, for the engine `recorded`."""
    hosts: TargetHosts | None = None
    """Hosts among which the target is divided; this process is rank 0."""
    trace: str = ""
    """Folder to which the spans are written at the end; empty records none."""
    replay: str = ""
    """Script of a traced worker to replay instead of serving an orchestrator."""

    @property
    def kept_bytes(self) -> int:
        """Of KV of ended sequences at most; 0 keeps none."""
        return self.kv_pool if self.kv_pool is not None and self.prefix_cache else self.prefix_cache << 20

    @classmethod
    def from_arguments(cls) -> "WorkerSetup":
        return msgspec.json.decode(sys.argv[-1], type=cls)


def serve(setup: WorkerSetup, build: Callable[[], Worker]) -> int:
    """Build the worker, send its Hello, and run it until a Shutdown. Returns the exit code of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nothing has to be cleaned up yet, and libraries swallow SystemExit while they are imported.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: os._exit(0))
    if setup.life is not None:
        die_with_parent(setup.life)
    raise_descriptor_limit()
    take_cores(setup.cores)
    set_quality_of_service(QualityOfService.USER_INTERACTIVE)
    if setup.replay:
        replay(build, Path(setup.replay), Path(setup.trace))
        return 0
    context = zmq.Context[zmq.Socket[bytes]]()
    link = _connect(context, setup)
    try:
        worker = build()
        signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))
        hello = worker.hello()
        link.send(hello)
        settle()
        _save_setup(setup, hello.role)
        with traced(worker, setup.trace, f"{hello.role}-{setup.incarnation}") as observed:
            run(observed, link, setup.patience)
        return 0
    except PipelineError as error:
        link.send(Fault(kind="fatal", text=plain(str(error))))
        return 1
    except Exception as error:  # noqa: BLE001 - the border: every failure is reported to the parent
        traceback.print_exc()
        link.send(Fault(kind="fatal", text=plain(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        link.close()
        context.term()
        unlink_owned()


def _connect(context: zmq.Context[zmq.Socket[bytes]], setup: WorkerSetup) -> Link:
    keys = own_keys(Path(setup.keys)) if setup.keys else None
    stamp = Stamp(setup.epoch, setup.incarnation)
    expected = ToWorker | FeatureBlock
    return Link(context, setup.address, stamp, expected, server=setup.server.encode(), keys=keys)


def _save_setup(setup: WorkerSetup, role: Role) -> None:
    """Write the setup of a traced worker, which its replay needs."""
    if setup.trace:
        (Path(setup.trace) / f"{role}-{setup.incarnation}.setup").write_bytes(msgspec.json.encode(setup))


def run(worker: Worker, link: Link, patience: float | None = None) -> None:
    """Handle all messages, do one unit of work, repeat; wait only when there is no work.

    Returns after a Shutdown, or after `patience` seconds without a message.
    """
    heard_at = time.monotonic()
    while True:
        messages = link.receive(0 if worker.has_work else _IDLE_SECONDS)
        if messages:
            heard_at = time.monotonic()
        elif patience is not None and time.monotonic() - heard_at > patience:
            return
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Cores):
                take_cores(message.cores)
                continue
            if isinstance(message, Ping):
                link.send(Pong(message.sent))
                # Trees are reference cycles, and a worker may never be idle. Collecting takes a millisecond.
                gc.collect()
                continue
            for reply in worker.handle(message):
                link.send(reply)
        if worker.has_work:
            for reply in worker.work():
                link.send(reply)


def die_with_parent(life: int, end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """End this process when the parent's end of the socket pair `life` closes, for whatever reason: at once, or as
    `end` does."""

    def watch() -> None:
        while os.read(life, 1):
            pass
        end()

    threading.Thread(target=watch, daemon=True, name="death-pipe").start()


_THREADS = Path("/proc/self/task")
_SET_THREADS = ("openblas_set_num_threads", "scipy_openblas_set_num_threads64_")
"""Of a distribution's OpenBLAS, and of NumPy's."""


def take_cores(cores: Sequence[int]) -> None:
    """Keep all threads on `cores`, and let OpenBLAS use one thread a core; nothing where the system can't, or for none.

    Affinity belongs to a thread, and a new thread has that of the one that starts it.
    """
    set_affinity = getattr(os, "sched_setaffinity", None)
    if not cores or set_affinity is None:
        return
    set_affinity(0, cores)
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            set_affinity(int(thread.name), cores)
    preloaded = ctypes.CDLL(None)
    for name in _SET_THREADS:
        if hasattr(preloaded, name):
            getattr(preloaded, name)(len(cores))
