"""Laws of a divided model's start: no rank computes with another before all have loaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.contracts.target_hosts import TargetHosts
from protocol.inference.language_model import LanguageModel
from protocol.worker.process import WorkerSetup
from target_worker import assembly
from target_worker.engine import TargetEngine, TargetModel
from tests.support.paths import DEMO_TARGET, ROOT
from tests.target_worker.tensor_parallel.test_ranks import free_ports

_LATE = 1.0
"""Seconds that rank 1 takes longer to load."""


@pytest.mark.thorough
def test_ranks_meet_on_the_processor_after_all_have_loaded_and_before_any_forward(tmp_path: Path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.loading_rank", str(hosts), str(rank), str(DEMO_TARGET), str(seconds)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for rank, seconds in enumerate((0.0, _LATE))
    ]
    try:
        quick, late = (json.loads(process.communicate(timeout=60)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()

    assert late["loaded"] > quick["loaded"]
    for rank in (quick, late):
        (_, met, on_processor), *forwards = rank["sums"]
        assert on_processor
        assert met >= late["loaded"]
        assert forwards
        assert all(began >= met for began, _, _ in forwards)


class Alone:
    """A division of nothing, whose peer is lost while it loads."""

    def divide(self, network: Any) -> None:
        pass

    def await_loaded(self) -> None:
        raise RuntimeError("[ring] recv failed")


def test_a_rank_that_is_lost_while_others_load_is_no_fault_of_the_model():
    with pytest.raises(RuntimeError, match="recv"):
        LanguageModel.load(DEMO_TARGET, Alone())


@pytest.mark.parametrize(("asked", "chunk"), [(512, 128), (32, 32)])
def test_a_divided_target_prefills_in_smaller_chunks_and_its_ranks_share_the_gpu(
    asked: int, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    chunks: list[int] = []
    shares: list[float] = []

    class Engine(TargetEngine):
        def __init__(self, model: TargetModel, prefill_chunk: int = 0, *others: Any) -> None:
            chunks.append(prefill_chunk)
            super().__init__(model, prefill_chunk, *others)

    monkeypatch.setattr(assembly, "TargetEngine", Engine)
    monkeypatch.setattr(assembly, "load_leading_model", lambda folder, *_: LanguageModel.load(folder))
    monkeypatch.setattr(assembly, "wire", lambda share, _: shares.append(share))
    hosts = TargetHosts((("127.0.0.1:1",), ("127.0.0.1:2",)))
    setup = WorkerSetup(address="", epoch=1, incarnation=1, engine="mlx", model=str(DEMO_TARGET), prefill_chunk=asked)
    setup = msgspec.structs.replace(setup, gpu_share=0.8)

    assembly.build(msgspec.structs.replace(setup, hosts=hosts))
    assembly.build(setup)

    assert chunks == [chunk, asked]
    assert shares == [0.4, 0.8], "ranks on one machine divide the target's share of its GPU"
