"""Laws of the GPU's shares: in proportion to the weights that MLX holds, which each worker's setup tells."""

from pathlib import Path

import msgspec
import pytest

from orchestrator.core.options import Options
from orchestrator.machine.memory.weights import loaded_drafter
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor, gpu_shares, weights_on_gpu
from protocol.contracts.target_hosts import TargetHosts
from protocol.messages.base import Role
from tests.support.models.drafter_files import write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

PAIR = OrchestratorSetup(session="", address="", target=str(DEMO_TARGET), draft=str(DEMO_DRAFT))
APART = TargetHosts((("10.0.0.1:1",), ("10.0.0.2:1",)))
TOGETHER = TargetHosts((("127.0.0.1:1",), ("127.0.0.1:2",)))


def test_shares_are_in_proportion_to_the_weights_and_sum_to_1():
    assert gpu_shares({"target": 6, "draft": 2}) == {"target": 0.75, "draft": 0.25}
    assert gpu_shares({"target": 0}) == gpu_shares({}) == {}


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({}, {"target", "draft"}),
        ({"prefill_engine": "mlx"}, {"target", "draft", "prefill"}),
        ({"draft_engine": "ngram"}, {"target"}),
        ({"draft_engine": "coreml"}, {"target"}),
        ({"draft_engine": "none"}, {"target"}),
        ({"draft_command": ("own",)}, {"target"}),
        ({"target_texts": "texts"}, {"draft"}),
        ({"target_engine": "none"}, {"draft"}),
        ({"options": Options(strategy="ar")}, {"target"}),
    ],
)
def test_only_workers_whose_weights_mlx_holds_have_a_share(changes: dict[str, object], roles: set[Role]):
    assert set(weights_on_gpu(msgspec.structs.replace(PAIR, **changes))) == roles


@pytest.mark.parametrize(("hosts", "part"), [(None, 1), (TOGETHER, 1), (APART, 2)])
def test_a_divided_target_counts_with_what_this_machine_holds(hosts: TargetHosts | None, part: int):
    weights = weights_on_gpu(msgspec.structs.replace(PAIR, target_hosts=hosts))

    assert weights == {"target": weight_bytes(DEMO_TARGET) // part, "draft": weight_bytes(DEMO_DRAFT)}
    assert weights["draft"] > 0


def test_an_exit_of_the_target_counts_with_its_layers_and_is_told_the_target(tmp_path: Path):
    folder = write(tmp_path / "exit", ({"model_type": "exit", "layers": 3}, {}))
    setup = msgspec.structs.replace(PAIR, draft=str(folder), draft_engine="layerskip")
    told = Supervisor(setup, Session(tmp_path), 1, {})._worker_setup("draft")

    assert weights_on_gpu(setup)["draft"] == loaded_drafter(folder, DEMO_TARGET, on_processor=False) > 0
    assert (told.model, told.target) == (str(folder), str(DEMO_TARGET))
    assert 0.2 < told.gpu_share < 0.5


def test_each_worker_is_told_its_share(tmp_path: Path):
    supervisor = Supervisor(PAIR, Session(tmp_path), 1, {})
    target, draft = (supervisor._worker_setup(role).gpu_share for role in ("target", "draft"))

    assert target + draft == pytest.approx(1.0)
    assert target > draft > 0


def test_a_folder_without_weights_has_none(tmp_path: Path):
    assert weight_bytes(tmp_path) == 0
