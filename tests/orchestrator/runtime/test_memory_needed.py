"""Laws of what a pipeline's processes need: memory of each kind of draft, and shares of the GPU by weights."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.core.options import Options
from orchestrator.machine.memory.weights import loaded_drafter
from orchestrator.machine.models.checkpoints import weight_bytes
from orchestrator.runtime.memory_needed import needed
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor, gpu_shares, weights_on_gpu
from protocol.contracts.coreml.conversion import FOLDER_FACTS, FOLDER_MODEL
from protocol.contracts.target_hosts import TargetHosts
from protocol.messages.base import Role
from tests.draft_worker.coreml.test_architectures import tiny as tiny_of
from tests.support.models import drafter_files
from tests.support.models.coreml_runs import convert, tiny
from tests.support.models.drafter_files import write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

ASKED = Options(context=1024, concurrent=3)


def _parts(**fields: Any) -> dict[str, int]:
    given = {"target": str(DEMO_TARGET), "draft": str(DEMO_DRAFT), "options": ASKED, **fields}
    return needed(OrchestratorSetup(session="", address="", **given)).parts


@pytest.mark.parametrize(
    ("fields", "processes"),
    [
        ({}, 3),
        ({"prefill_engine": "mlx"}, 4),
        ({"draft_engine": "none"}, 2),
        ({"target_engine": "none"}, 2),
        ({"options": Options(strategy="ar")}, 2),
    ],
)
def test_the_processes_on_this_machine_count(fields: dict[str, Any], processes: int):
    assert _parts(**fields)["the processes"] == processes * (256 << 20)


def test_a_tokenizer_counts_beyond_the_usual_size(tmp_path: Path):
    shutil.copytree(DEMO_TARGET, tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "tokenizer.json", 100 << 20)

    assert "the tokenizer" not in _parts()
    assert _parts(target=str(tmp_path))["the tokenizer"] == 2 * (16 * 100 - 128) << 20


def _waits(**fields: Any) -> int:
    """Bytes that a disk cache adds."""
    given = {"target": str(DEMO_TARGET), "draft": str(DEMO_DRAFT), **fields}
    setups = [OrchestratorSetup(session="", address="", options=Options(disk_cache=gb), **given) for gb in (0, 1)]
    without, with_disk = map(needed, setups)
    return with_disk.total_bytes - without.total_bytes


def test_turns_that_wait_for_the_disk_count_unless_none_are_kept():
    one = needed(OrchestratorSetup(session="", address="", target=str(DEMO_TARGET), draft="")).parts["the target's KV"]

    assert _waits() == one + (Options().arenas << 20)
    assert _waits(target_hosts=TargetHosts((("127.0.0.1:1",), ("127.0.0.1:2",)))) == 0
    assert _waits(target_engine="none") == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["attention", "short convolutions"])
def test_a_core_ml_draft_counts_with_a_cache_for_each_request_and_a_joint_one(name: str, tmp_path: Path):
    convolutions = {"layers": 2, "layer_types": ["conv", "full_attention"]}
    model = tiny("qwen2") if name == "attention" else tiny_of("lfm2", **convolutions)
    package = convert(model, tmp_path).package
    (tmp_path / FOLDER_FACTS).write_bytes(msgspec.json.encode(package))

    parts = _parts(draft=str(tmp_path), draft_engine="coreml")

    assert parts["the KV of the draft in Core ML"] == 4 * 4 * math.prod(package.host_shape)
    assert parts["Core ML's copies of the draft"] > 0
    assert "feature rings" not in parts


def test_a_converted_drafter_has_rings_too(tmp_path: Path):
    (tmp_path / FOLDER_MODEL).mkdir()
    (tmp_path / "host.safetensors").touch()
    (tmp_path / FOLDER_FACTS).write_text('{"source": "drafter", "conditioning": {}}')

    assert _parts(draft=str(tmp_path), draft_engine="coreml")["feature rings"] == 3 * (64 << 20)


@pytest.mark.parametrize(("format", "engine", "rings"), [("trained_exit", "layerskip", 0), ("safeailab", "eagle3", 3)])
def test_only_a_drafter_that_reads_features_has_rings(format: str, engine: str, rings: int, tmp_path: Path):
    drafter_files.write(tmp_path, drafter_files.FORMATS[format]())

    assert _parts(draft=str(tmp_path), draft_engine=engine).get("feature rings", 0) == rings * (64 << 20)


# Shares of the GPU -------------------------------------------------------------------------------


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
