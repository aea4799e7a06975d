"""Laws of waiting for a worker that is measured: loading may take long, an answer may not, and a death ends it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator.core.options import Options
from orchestrator.lab.worker_harness import WorkerHarness
from orchestrator.machine.neural_engine import Limits
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.errors import PipelineError
from tests.support.paths import DEMO_TARGET

WORKER = """
import sys, time
from draft_worker.worker import DraftWorker
from protocol.worker.process import WorkerSetup, serve
from tests.support.fake_draft import FakeEngine

def load():
    time.sleep({seconds})
    {then}
    return DraftWorker(FakeEngine(), time.perf_counter)

sys.exit(serve(WorkerSetup.from_arguments(), load))
"""


@contextmanager
def harness(limits: Limits, seconds: float = 0.0, then: str = "pass") -> Iterator[WorkerHarness]:
    """Of a draft that loads for `seconds` and does `then`."""
    session = Session.create()
    setup = OrchestratorSetup(
        session=str(session.folder),
        address=session.client_address,
        target=str(DEMO_TARGET),
        draft="",
        draft_command=(sys.executable, "-c", WORKER.format(seconds=seconds, then=then)),
        options=Options(arena_memory=0),
    )
    try:
        with WorkerHarness(setup, session, {}, limits) as found:
            yield found
    finally:
        session.remove()


def test_a_worker_may_load_for_longer_than_it_may_be_silent_and_is_then_given_up():
    with harness(Limits(silence=0.1), seconds=0.5) as loaded:
        assert loaded.start("draft").role == "draft"
        with pytest.raises(PipelineError, match="silent for"):
            loaded.receive()


@pytest.mark.parametrize(
    ("limits", "seconds", "then", "reason"),
    [(Limits(loading=0.3), 60, "pass", "did not load"), (Limits(), 0, "sys.exit('no room')", "no room")],
    ids=["does not end", "dies"],
)
def test_a_load_that_does_not_end_or_dies_is_not_waited_for(limits: Limits, seconds: float, then: str, reason: str):
    with harness(limits, seconds, then) as loading, pytest.raises(PipelineError, match=reason):
        loading.start("draft")
