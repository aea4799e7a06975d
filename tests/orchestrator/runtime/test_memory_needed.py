"""Laws of what a pipeline's processes need: each kind of draft counts with what its process holds."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.core.options import Options
from orchestrator.runtime.memory_needed import needed
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.coreml.conversion import FOLDER_FACTS, FOLDER_MODEL
from protocol.contracts.target_hosts import TargetHosts
from tests.draft_worker.coreml.test_architectures import tiny as tiny_of
from tests.support.models import drafter_files
from tests.support.models.coreml_runs import convert, tiny
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
