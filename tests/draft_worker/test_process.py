"""Laws of the draft as a process: it sends Hello, works, and ends on Shutdown."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Grow, Hello, Shutdown, Start
from protocol.transport.codec import Stamp
from protocol.transport.hub import Hub
from protocol.worker.process import WorkerSetup
from tests.support.paths import DEMO_DRAFT

DEMO = DEMO_DRAFT
STAMP = Stamp(epoch=5, incarnation=2)
START = Start(
    SequenceId(1), 0, (5, 6, 7, 8, 9, 5, 6, 7), NodeId(3), Sampling(temperature=1.0), BestFirst(width=2, fan=2)
)


class Draft:
    """A draft process and its hub."""

    def __init__(self, engine: str, model: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="draft", dir="/tmp")
        address = f"ipc://{self._folder.name}/hub"
        self._context = zmq.Context[Any]()
        self._hub = Hub(self._context, address, FromWorker)
        setup = WorkerSetup(address=address, epoch=5, incarnation=2, engine=engine, model=model)
        command = [sys.executable, "-m", "draft_worker", msgspec.json.encode(setup).decode()]
        self.process = subprocess.Popen(command)
        self._peer = b""

    def next(self) -> Any:
        """The next message of the process, within a minute."""
        assert self._hub.socket.poll(60_000)
        arrival = next(self._hub.receive())
        assert arrival.stamp == STAMP
        self._peer = arrival.peer
        return arrival.message

    def tell(self, message: Start | Shutdown) -> None:
        assert self._hub.send(self._peer, message, STAMP)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._hub.close()
        self._context.term()
        self._folder.cleanup()


@pytest.fixture
def draft(request: pytest.FixtureRequest) -> Iterator[Draft]:
    draft = Draft(*request.param)
    yield draft
    draft.close()


@pytest.mark.parametrize("draft", [("mlx", str(DEMO)), ("ngram", "")], indirect=True, ids=["mlx", "ngram"])
def test_a_draft_process_serves_and_ends_in_good_order(draft: Draft):
    hello = draft.next()
    assert isinstance(hello, Hello)
    assert (hello.role, hello.pid) == ("draft", draft.process.pid)

    draft.tell(START)
    growth = draft.next()
    assert isinstance(growth, Grow)
    assert growth.parents == (START.root,) * len(growth.tokens) != ()

    draft.tell(Shutdown())
    assert draft.process.wait(30) == 0


@pytest.mark.parametrize("draft", [("crystal ball", "")], indirect=True, ids=["unknown"])
def test_an_unknown_engine_is_named_in_the_last_message(draft: Draft):
    fault = draft.next()

    assert isinstance(fault, Fault)
    assert (fault.kind, fault.text.split(":")[0]) == ("fatal", "There is no draft engine called 'crystal ball'")
    assert draft.process.wait(30) == 1


def test_prompt_lookup_needs_no_mlx():
    check = "import sys, draft_worker.__main__, draft_worker.engines.ngram; sys.exit('mlx.core' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
