"""Law of the draft worker's memory: a process that holds weights with MLX wires its share."""

import pytest

from draft_worker.engines import mlx
from protocol.inference.device import BESIDE_TARGET
from protocol.worker.process import WorkerSetup
from tests.support.paths import DEMO_DRAFT


def test_a_draft_wires_its_share(monkeypatch: pytest.MonkeyPatch):
    wired: list[tuple[float, object]] = []
    monkeypatch.setattr(mlx, "wire", lambda share, reserve: wired.append((share, reserve)))
    mlx.load(WorkerSetup(address="", epoch=1, incarnation=1, engine="mlx", model=str(DEMO_DRAFT), gpu_share=0.25))

    assert wired == [(0.25, BESIDE_TARGET)]
