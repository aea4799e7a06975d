"""Laws of the draft worker's memory: every process that holds weights with MLX wires its share."""

import pytest

import draft_worker.prefill.__main__ as prefill
from draft_worker.engines import mlx
from protocol.inference import device
from protocol.inference.device import BESIDE_TARGET, Reserve
from protocol.worker.process import WorkerSetup
from tests.support.paths import DEMO_DRAFT

SETUP = WorkerSetup(address="", epoch=1, incarnation=1, engine="mlx", model=str(DEMO_DRAFT), gpu_share=0.25)


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Reserve]]:
    calls: list[tuple[float, Reserve]] = []
    for module in (device, mlx):
        monkeypatch.setattr(module, "wire", lambda share, reserve: calls.append((share, reserve)))
    return calls


def test_a_draft_wires_its_share(wired: list[tuple[float, Reserve]]):
    mlx.load(SETUP)

    assert wired == [(0.25, BESIDE_TARGET)]


def test_a_prefill_worker_wires_its_share(wired: list[tuple[float, Reserve]]):
    prefill._load_engine(SETUP)

    assert wired == [(0.25, BESIDE_TARGET)]
