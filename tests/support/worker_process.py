"""A worker as a process, and the orchestrator's end of its socket."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from orchestrator.runtime.hub import Hub
from protocol.messages.worker import FromWorker, ToWorker
from protocol.transport import Stamp
from protocol.worker.process import WorkerSetup

STAMP = Stamp(epoch=3, incarnation=1)


class WorkerProcess:
    def __init__(self, hub: Hub, process: subprocess.Popen[bytes]) -> None:
        self.hub = hub
        self.process = process
        self.peer = b""

    def hear(self) -> Any:
        """The next message."""
        assert self.hub.socket.poll(110_000), "the worker said nothing for 110 s"
        arrival = next(self.hub.receive())
        assert arrival.stamp == STAMP
        self.peer = arrival.peer
        return arrival.message

    def tell(self, message: ToWorker) -> None:
        assert self.hub.send(self.peer, message, STAMP)

    def ask(self, message: ToWorker) -> Any:
        self.tell(message)
        return self.hear()


@contextmanager
def running(package: str, engine: str, model: str, **setup: Any) -> Iterator[WorkerProcess]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, zmq.Context[Any]() as context:
        address = f"ipc://{folder}/hub"
        hub = Hub(context, address, FromWorker)
        given = WorkerSetup(address=address, epoch=3, incarnation=1, engine=engine, model=model, **setup)
        process = subprocess.Popen([sys.executable, "-m", package, msgspec.json.encode(given).decode()])
        try:
            yield WorkerProcess(hub, process)
        finally:
            process.kill()
            process.wait()
            hub.close()
