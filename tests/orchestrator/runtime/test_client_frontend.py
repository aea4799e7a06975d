"""Who may watch: the texts of other clients' requests are only for those at the pipeline's own socket."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from orchestrator.api.client import STAMP
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.core.telemetry.recorder import TelemetryRecorder
from orchestrator.core.telemetry.watchers import Watchers
from orchestrator.runtime.client_frontend import ClientAddress, ClientFrontend
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.client import Refused
from protocol.messages.telemetry import TelemetryFrame, ToClientOrWatcher, Watch
from protocol.transport.sockets import Link
from tests.support.fake_pipeline import READY
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET


@pytest.fixture
def session() -> Iterator[Path]:
    # A socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="lp", dir="/tmp") as folder:
        yield Path(folder)


def answers(session: Path, address: str) -> list[object]:
    """What a client hears that asks to watch a desk at this address."""
    setup = OrchestratorSetup(session=str(session), address=address, target=str(DEMO), draft=str(DEMO))
    watchers = Watchers[ClientAddress](TelemetryRecorder(Machine(Options()), str))
    context = zmq.Context()
    try:
        desk = ClientFrontend(context, setup, TextCodec(DEMO), lambda: READY, watchers)
        link = Link(context, desk.socket.getsockopt_string(zmq.LAST_ENDPOINT), STAMP, ToClientOrWatcher)
        link.send(Watch())
        assert desk.socket.poll(10_000)
        assert list(desk.receive()) == []
        desk.send_telemetry(time.monotonic())
        return link.receive(10.0)
    finally:
        context.destroy(linger=0)


def test_whoever_opens_the_sessions_own_socket_may_watch(session: Path):
    (scene,) = answers(session, Session(session).client_address)

    assert isinstance(scene, TelemetryFrame)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://{session}/elsewhere"])
def test_nobody_watches_through_an_address_that_others_reach(session: Path, address: str):
    (refused,) = answers(session, address.format(session=session))

    assert isinstance(refused, Refused)
    assert "nobody may watch" in refused.text
