"""Laws of the clients' socket: frames hold other clients' texts, so only the session's own socket gives them, and no
text that can't fit is tokenized while the others wait."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from orchestrator.api.client import STAMP
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.runtime.client_frontend import ClientAddress, ClientFrontend
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.telemetry import Subscribers, TelemetryRecorder
from orchestrator.text.tokenizer import MOST_CHARACTERS, TextCodec
from protocol.messages.client import Refused, Submit
from protocol.messages.sampling import RequestedSampling
from protocol.messages.telemetry import TelemetryFrame, ToClientOrSubscriber, Watch
from protocol.transport import Link
from tests.support.fake_pipeline import READY
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
WATCH = Watch()


@pytest.fixture
def session() -> Iterator[Path]:
    # A socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="lp", dir="/tmp") as folder:
        yield Path(folder)


def answers(session: Path, address: str, message: Watch | Submit = WATCH) -> list[object]:
    """What a client receives that sends this to a frontend at this address."""
    setup = OrchestratorSetup(session=str(session), address=address, target=str(DEMO), draft=str(DEMO))
    subscribers = Subscribers[ClientAddress](TelemetryRecorder(Machine(Options()), str))
    context = zmq.Context()
    try:
        frontend = ClientFrontend(context, setup, TextCodec(DEMO), lambda: READY, subscribers)
        link = Link(context, frontend.socket.getsockopt_string(zmq.LAST_ENDPOINT), STAMP, ToClientOrSubscriber)
        link.send(message)
        assert frontend.socket.poll(10_000)
        assert list(frontend.receive()) == []
        frontend.send_telemetry(time.monotonic())
        return link.receive(10.0)
    finally:
        context.destroy(linger=0)


def test_the_sessions_own_socket_gives_telemetry(session: Path):
    (frame,) = answers(session, Session(session).client_address)

    assert isinstance(frame, TelemetryFrame)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://{session}/elsewhere"])
def test_an_address_that_others_can_reach_gives_no_telemetry(session: Path, address: str):
    (refused,) = answers(session, address.format(session=session))

    assert isinstance(refused, Refused)
    assert "gives no telemetry" in refused.text


def test_a_text_that_is_far_too_long_is_refused_untokenized(session: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TextCodec, "encode", None)
    text = " " * (READY.context * MOST_CHARACTERS + 1)

    (refused,) = answers(session, Session(session).client_address, Submit("a", text, None, RequestedSampling(), 1))

    assert isinstance(refused, Refused)
    assert refused.text == "The prompt is far longer than the context of 256 tokens: shorten it."
