"""Laws of the draft as a process: it sends Hello, works, and ends on Shutdown."""

import subprocess
import sys

import pytest

from draft_worker.__main__ import open_engine
from draft_worker.engines.mlx import MlxEngine
from protocol.inference import device
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Grow, Hello, Shutdown, Start
from protocol.worker.pacing import DevicePace
from protocol.worker.process import WorkerSetup
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.worker_process import running

START = Start(
    RequestId(1), 0, (5, 6, 7, 8, 9, 5, 6, 7), NodeId(3), Sampling(temperature=1.0), BestFirst(width=2, fan=2)
)


@pytest.mark.parametrize(("engine", "model"), [("mlx", str(DEMO_DRAFT)), ("ngram", "")])
def test_a_draft_process_serves_and_ends_in_good_order(engine: str, model: str):
    with running("draft_worker", engine, model) as draft:
        hello = draft.hear()
        assert isinstance(hello, Hello)
        assert (hello.role, hello.pid) == ("draft", draft.process.pid)

        growth = draft.ask(START)
        assert isinstance(growth, Grow)
        assert growth.parents == (START.root,) * len(growth.tokens) != ()

        draft.tell(Shutdown())
        assert draft.process.wait(30) == 0


@pytest.mark.parametrize(
    ("package", "words"),
    [("draft_worker", "no draft engine called 'crystal ball'"), ("target_worker", "no engine named 'crystal ball'")],
)
def test_an_unknown_engine_is_named_in_the_last_message(package: str, words: str):
    with running(package, "crystal ball", str(DEMO_TARGET)) as worker:
        fault = worker.hear()

        assert isinstance(fault, Fault)
        assert (fault.kind, words in fault.text) == ("fatal", True)
        assert worker.process.wait(30) == 1


def test_prompt_lookup_needs_no_mlx():
    check = "import sys, draft_worker.__main__, draft_worker.engines.ngram; sys.exit('mlx.core' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


COSTS = ((1, 0.5),)
PACE = DevicePace(steps=((1, 0.25),), prefill_rate=64.0)


@pytest.mark.parametrize(
    ("engine", "pace", "measured"), [("mlx", None, [True]), ("mlx", PACE, []), ("ngram", None, [])]
)
def test_a_draft_with_weights_wires_its_share_and_measures_its_forwards_unless_paced(
    engine: str, pace: DevicePace | None, measured: list[bool], monkeypatch: pytest.MonkeyPatch
):
    wired: list[tuple[float, object]] = []
    asked: list[bool] = []
    monkeypatch.setattr(device, "wire", lambda share, reserve: wired.append((share, reserve)))
    monkeypatch.setattr(MlxEngine, "measured", lambda self, loading, identity: asked.append(" " in identity) or COSTS)
    model = str(DEMO_DRAFT) if engine == "mlx" else ""
    setup = WorkerSetup(address="", epoch=1, incarnation=1, engine=engine, model=model, gpu_share=0.25, pace=pace)

    opened = open_engine(setup)

    assert wired == ([(0.25, device.BESIDE_TARGET)] if engine == "mlx" else [])
    assert asked == measured
    assert opened.costs == (COSTS if measured else ())
