"""The target as a process: it sends Hello, verifies, reports errors and ends."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from protocol.contracts.target_hosts import TargetHosts
from protocol.features.ring import FeatureRing
from protocol.inference.language_model import LanguageModel
from protocol.kv.segments import SegmentError
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.features import FINAL, Features, Tap, Taps
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Hello, Prefilled, Shutdown, Start, Verdict, Verify
from protocol.transport.codec import Stamp
from protocol.transport.hub import Hub
from protocol.worker.process import WorkerSetup
from tests.support.paths import DEMO_TARGET
from tests.target_worker.tensor_parallel.test_ranks import free_ports

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
def _running(model: Path, engine: str = "mlx", hosts: TargetHosts | None = None) -> Iterator[_Target]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, zmq.Context[Any]() as context:
        address = f"ipc://{folder}/hub"
        hub = Hub(context, address, FromWorker)
        setup = WorkerSetup(address=address, epoch=3, incarnation=1, engine=engine, model=str(model), hosts=hosts)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_target_offers_features_and_its_rings_end_with_it(ranks: int, registry: Path):
    """Also of the last layer, whose output no KV of a prompt depends on: every rank of a divided target computes it."""
    hosts = TargetHosts(tuple((f"127.0.0.1:{port}",) for port in free_ports(2)), silence=30.0) if ranks > 1 else None
    with _running(_DEMO, hosts=hosts) as target:
        assert target.hear().taps == Taps(layers=6, width=256)
        assert target.hub.send(target.peer, Tap((FINAL, 1, 5)), _STAMP)
        prefilled = target.ask(Start(SequenceId(1), 0, (5, 6, 7, 8, 9), NodeId(3), Sampling()))
        features = target.hear()
        assert isinstance(prefilled, Prefilled)
        assert isinstance(features, Features)
        assert (features.first, features.rows) == (0, 4)
        ring = FeatureRing.attach(features.name)
        assert ring.epoch == 3
        found = ring.read(0, 4, (FINAL, 1, 5))
        assert found is not None
        np.testing.assert_allclose(found, _rows((5, 6, 7, 8), (FINAL, 1, 5)), atol=1e-3)
        ring.close()

        assert target.hub.send(target.peer, Shutdown(), _STAMP)
        assert target.process.wait(30) == 0
    assert list(registry.iterdir()) == []
    with pytest.raises(SegmentError):
        FeatureRing.attach(features.name)


def _rows(tokens: Sequence[int], outputs: tuple[int, ...]) -> np.ndarray:
    model = LanguageModel.load(_DEMO)
    model.record(outputs)
    sequence = model.sequence()
    sequence.prefill(tokens)
    assert sequence.recorded is not None
    return np.array(sequence.recorded.rows)


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
