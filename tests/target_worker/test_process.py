"""The target as a process: it sends Hello, verifies, reports errors and ends."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from protocol.messages.base import NodeId, SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Hello, Prefilled, Shutdown, Start, Verdict, Verify
from protocol.transport.codec import Stamp
from protocol.transport.hub import Hub
from protocol.worker.process import WorkerSetup
from tests.support.paths import DEMO_TARGET

_DEMO = DEMO_TARGET
_STAMP = Stamp(epoch=3, incarnation=1)


class _Target:
    """A running target and the orchestrator's end of its socket."""

    def __init__(self, hub: Hub, process: subprocess.Popen[bytes]) -> None:
        self.hub = hub
        self.process = process
        self.peer = b""

    def hear(self) -> Any:
        assert self.hub.socket.poll(60_000), "the target said nothing for a minute"
        arrival = next(self.hub.receive())
        self.peer = arrival.peer
        return arrival.message

    def ask(self, message: Start | Verify) -> Any:
        assert self.hub.send(self.peer, message, _STAMP)
        return self.hear()


@contextmanager
def _running(model: Path, engine: str = "mlx") -> Iterator[_Target]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, zmq.Context[Any]() as context:
        address = f"ipc://{folder}/hub"
        hub = Hub(context, address, FromWorker)
        setup = WorkerSetup(address=address, epoch=3, incarnation=1, engine=engine, model=str(model))
        process = subprocess.Popen([sys.executable, "-m", "target_worker", msgspec.json.encode(setup).decode()])
        try:
            yield _Target(hub, process)
        finally:
            process.kill()
            process.wait()
            hub.close()


def test_a_target_process_serves_and_ends_in_good_order():
    tokens = (5, 6, 7, 8, 9)
    with _running(_DEMO) as target:
        hello = target.hear()
        assert isinstance(hello, Hello)
        assert (hello.role, hello.vocabulary, hello.context) == ("target", 4096, 2048)
        assert hello.pid == target.process.pid

        prefilled = target.ask(Start(SequenceId(1), 0, tokens, NodeId(3), Sampling(temperature=1.0)))
        assert isinstance(prefilled, Prefilled)
        assert prefilled.tokens == 4

        verdict = target.ask(Verify(SequenceId(1), 0, NodeId(3), 4, (9, 1, 2), (-1, 0, 0)))
        assert isinstance(verdict, Verdict)
        assert (verdict.sequence, verdict.round) == (1, 0)

        assert target.hub.send(target.peer, Shutdown(), _STAMP)
        assert target.process.wait(30) == 0


def test_a_folder_without_a_model_is_named_in_the_last_message(tmp_path: Path):
    with _running(tmp_path) as target:
        fault = target.hear()

        assert isinstance(fault, Fault)
        assert fault.kind == "fatal"
        assert fault.text.startswith(f"{tmp_path} holds no model")
        assert target.process.wait(30) == 1


def test_an_unknown_engine_is_named_in_the_last_message():
    with _running(_DEMO, engine="abacus") as target:
        assert "no engine named 'abacus'" in target.hear().text
