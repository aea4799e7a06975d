"""Laws of what a pipeline's processes need: each kind of draft counts with what its process holds."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.core.options import Options
from orchestrator.runtime.memory_needed import needed
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.coreml.conversion import FOLDER_FACTS
from tests.draft_worker.coreml.test_architectures import tiny as tiny_of
from tests.support.models import drafter_files
from tests.support.models.coreml_runs import convert, tiny
from tests.support.paths import DEMO_TARGET

ASKED = Options(context=1024, concurrent=3)


def _parts(**fields: Any) -> dict[str, int]:
    return needed(OrchestratorSetup(session="", address="", target=str(DEMO_TARGET), options=ASKED, **fields)).parts


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


@pytest.mark.parametrize(("format", "engine", "rings"), [("trained_exit", "layerskip", 0), ("safeailab", "eagle3", 3)])
def test_only_a_drafter_that_reads_features_has_rings(format: str, engine: str, rings: int, tmp_path: Path):
    drafter_files.write(tmp_path, drafter_files.FORMATS[format]())

    assert _parts(draft=str(tmp_path), draft_engine=engine).get("feature rings", 0) == rings * (64 << 20)
