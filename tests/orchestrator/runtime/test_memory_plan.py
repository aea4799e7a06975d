"""Laws of a pipeline's memory: what its processes need, what does not fit is not started, and what is lowered is told.

Starts nothing."""

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from orchestrator.api.pipeline import Pipeline
from orchestrator.cli.app import cli
from orchestrator.core.options import Options
from orchestrator.runtime import memory_plan
from orchestrator.runtime.memory_plan import loaded_drafter, needed
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from orchestrator.runtime.workers.supervisor import Supervisor, gpu_shares, weights_on_gpu
from protocol.contracts.coreml import FOLDER_FACTS
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import InputError
from protocol.messages.base import Role
from tests.support.models import drafter_files
from tests.support.models.coreml_runs import convert, tiny, tiny_of
from tests.support.models.drafter_files import write
from tests.support.models.gguf_files import write_gguf
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

ASKED = Options(context=1024, concurrent=3)
MIB = 1 << 20
STATED = {"arena_memory": 2048, "prefix_cache_memory": 512}


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
    (tmp_path / FOLDER_FACTS).write_bytes(msgspec.json.encode(package.facts))

    parts = _parts(draft=str(tmp_path), draft_engine="coreml")

    assert parts["the KV of the draft in Core ML"] == 4 * 4 * math.prod(package.host_shape)
    assert parts["Core ML's copies of the draft"] > 0
    assert "feature rings" not in parts


def test_a_drafter_that_reads_features_has_rings(tmp_path: Path):
    drafter_files.write(tmp_path, drafter_files.safeailab())

    assert _parts(draft=str(tmp_path), draft_engine="eagle3")["feature rings"] == 3 * (64 << 20)


# What fits ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "gpu_working_set", lambda: 0)


def _pipeline(monkeypatch: pytest.MonkeyPatch, mib: int, **options: Any) -> Pipeline:
    """On a machine with so much memory."""
    monkeypatch.setattr(memory_plan, "memory_bytes", lambda: mib * MIB)
    return Pipeline(**{"target": str(DEMO_TARGET), "draft": str(DEMO_DRAFT), "draft_engine": "mlx", **options})


def _chosen(pipeline: Pipeline) -> Options:
    return pipeline._setup.options


def _budget(**options: Any) -> int:
    setup = OrchestratorSetup(
        session="", address="", target=str(DEMO_TARGET), draft=str(DEMO_DRAFT), options=Options(**options)
    )
    return needed(setup).required_bytes


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"This pipeline needs .* the target's KV .* What fits: ") as refused:
        _pipeline(monkeypatch, 1400, context=2048, concurrent=64)
    advised = re.search(r"--concurrent (\d+)", str(refused.value))

    assert advised is not None
    assert _chosen(_pipeline(monkeypatch, 1400, context=2048, concurrent=int(advised[1]))).context == 2048


def test_the_check_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    assert _chosen(_pipeline(monkeypatch, 100, context=2048, memory_check="off")).context == 2048
    with pytest.raises(InputError, match="--memory-check off"):
        _pipeline(monkeypatch, 100)


@pytest.mark.parametrize("command", ["generate hi", "serve --port 0"])
@pytest.mark.usefixtures("home")
def test_a_pair_that_does_not_fit_is_refused_before_it_is_downloaded(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_plan, "memory_bytes", lambda: 8 << 30)
    refused = CliRunner().invoke(cli, [*command.split(), "--pair", "qwen3-14b"]).exception

    assert re.search(r"Qwen3-14B-4bit has weights of 7\.8 GiB, and a pipeline may use 6\.0 GiB of this", str(refused))


def test_a_gguf_file_that_does_not_fit_is_refused_before_it_is_converted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
):
    write_gguf(tmp_path / "m.gguf", kinds={"": "Q4_K"})
    target: dict[str, Any] = {"target": str(tmp_path / "m.gguf"), "draft": None, "draft_engine": "none"}

    with pytest.raises(
        InputError, match=r"m\.gguf \(1 MiB\) becomes weights of \d+ MiB, .*and a pipeline may use 1 MiB"
    ):
        _pipeline(monkeypatch, 0, **target)
    assert not list(home.glob("**/gguf/*"))
    _pipeline(monkeypatch, 0, memory_check="off", **target)
    # What is converted already is refused with the whole arithmetic.
    with pytest.raises(InputError, match="the target's weights"):
        _pipeline(monkeypatch, 0, **target)


def test_auto_takes_what_fits_and_says_so_where_it_is_less_than_asked_for(monkeypatch: pytest.MonkeyPatch):
    small, large = (_pipeline(monkeypatch, mib, context="auto", concurrent=64) for mib in (1400, 64_000))
    found = _chosen(small).context

    assert isinstance(found, int)
    assert _budget(context=found, concurrent=64) <= 0.75 * 1400 * MIB < _budget(context=found + 256, concurrent=64)
    assert f"A request may have {found:,} of the target's" in small.note
    assert _chosen(large).context == 2048
    assert large.note == ""


def test_caches_take_what_the_models_leave(monkeypatch: pytest.MonkeyPatch):
    pipeline = _pipeline(monkeypatch, 2000, arena_memory=1024, prefix_cache_memory=512)
    options = _chosen(pipeline)

    assert 16 <= options.arenas < 1024
    assert options.arenas == pytest.approx(2 * options.prefix_cache, abs=17)
    assert "The caches for KV are lowered to " in pipeline.note
    assert _budget() + (options.arenas + 2 * options.prefix_cache) * MIB <= 0.75 * 2000 * MIB


def test_caches_fit_as_soon_as_the_least_of_each_does(monkeypatch: pytest.MonkeyPatch):
    least = _pipeline(monkeypatch, 64_000, arena_memory=16, prefix_cache_memory=16).memory().bytes
    for room in (least + extra * MIB for extra in (0, 1, 10, 100, 500)):
        assert room - 3 * MIB < _pipeline(monkeypatch, 64_000, room=room, **STATED).memory().bytes <= room
    assert _pipeline(monkeypatch, 64_000, room=least - 1, **STATED).memory().bytes == least


def test_a_plan_takes_the_room_that_there_is(monkeypatch: pytest.MonkeyPatch):
    least = _pipeline(monkeypatch, 64_000, arena_memory=0).memory().bytes
    for more in (50, 200):
        pipeline = _pipeline(monkeypatch, 64_000, room=least + more * MIB)

        assert least + (more - 3) * MIB < pipeline.memory().bytes <= least + more * MIB
        assert re.match("Keeps about [0-9,]+ tokens of conversations.", pipeline.keeps)
    assert _pipeline(monkeypatch, 64_000, **STATED).keeps == ""


@pytest.mark.parametrize("mib", [1100, 1300])
def test_auto_takes_what_other_pipelines_leave(monkeypatch: pytest.MonkeyPatch, mib: int):
    asked = {"context": "auto", "concurrent": 64, **STATED}
    memory = _pipeline(monkeypatch, 64_000, room=mib * MIB, **asked).memory()
    fitted = {**asked, **memory.options}
    longer = {**fitted, "context": fitted["context"] + 256}

    assert memory.bytes <= mib * MIB < _pipeline(monkeypatch, 64_000, **longer).memory().bytes
    assert _pipeline(monkeypatch, 64_000, **fitted).memory() == memory


@pytest.mark.parametrize(
    ("asked", "counted"), [({}, "1 × 2,048 tokens"), ({"context": 1024, "concurrent": 3}, "3 × 1,024 tokens")]
)
def test_what_is_counted_is_told(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], counted: str):
    assert _pipeline(monkeypatch, 64_000, **asked).memory().kv_for == counted


def test_auto_that_fits_nothing_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"64 × 1,024 tokens.*--concurrent (\d+)"):
        _pipeline(monkeypatch, 1150, context="auto", concurrent=64)
    assert _chosen(_pipeline(monkeypatch, 100, context="auto", memory_check="off")).context == 1024


def test_what_the_refusal_of_an_unasked_context_advises_is_started(monkeypatch: pytest.MonkeyPatch):
    enough = -(-_budget() * 4 // 3 // MIB)
    with pytest.raises(InputError, match="What fits: --context 1792 with --concurrent 1"):
        _pipeline(monkeypatch, enough - 1)

    assert _chosen(_pipeline(monkeypatch, enough - 1, context=1792, concurrent=1)).context == 1792


def test_a_mac_is_asked_what_it_recommends_only_where_that_matters(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(memory_plan, "gpu_working_set", lambda: asked.append(1) or 600 * MIB)
    _pipeline(monkeypatch, 64_000)

    assert not asked
    with pytest.raises(InputError, match=r"may use 0\.6 GiB"):
        _pipeline(monkeypatch, 1500)


@pytest.mark.parametrize(("free", "asked", "found"), [(100, 2048, 50), (100, 20, 20), (None, 2048, 2048)])
def test_kv_takes_at_most_half_of_the_memory_that_can_be_shared(
    free: int | None, asked: int, found: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_plan, "free_shared_memory", lambda: None if free is None else free << 20)

    assert _chosen(_pipeline(monkeypatch, 64_000, arena_memory=asked)).arena_memory == found


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

    assert weights == {"target": ModelFolder(DEMO_TARGET).size // part, "draft": ModelFolder(DEMO_DRAFT).size}
    assert weights["draft"] > 0


def test_a_trained_drafter_counts_with_its_target_s_ends_and_is_told_the_target(tmp_path: Path):
    folder = write(tmp_path / "drafter", drafter_files.safeailab())
    setup = msgspec.structs.replace(PAIR, draft=str(folder), draft_engine="eagle3")
    told = Supervisor(setup, Session(tmp_path), 1, {})._worker_setup("draft")

    assert weights_on_gpu(setup)["draft"] == loaded_drafter(folder, DEMO_TARGET, on_processor=False) > 0
    assert (told.model, told.target) == (str(folder), str(DEMO_TARGET))
