"""Laws of the check of memory: what does not fit is not started, and what is lowered is told. Starts nothing."""

import re
from typing import Any

import pytest

from orchestrator.api import memory_check
from orchestrator.api.pipeline import Pipeline
from orchestrator.core.options import Options
from orchestrator.runtime.memory_needed import needed
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.errors import InputError
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

MIB = 1 << 20
STATED = {"arena_memory": 2048, "prefix_cache_memory": 512}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "gpu_working_set", lambda: 0)


def _pipeline(monkeypatch: pytest.MonkeyPatch, mib: int, **options: Any) -> Pipeline:
    """On a machine with so much memory."""
    monkeypatch.setattr(memory_check, "memory_bytes", lambda: mib * MIB)
    return Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT), **{"draft_engine": "mlx", **options})


def _options(pipeline: Pipeline) -> Options:
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
    assert _options(_pipeline(monkeypatch, 1400, context=2048, concurrent=int(advised[1]))).context == 2048


def test_the_check_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    assert _options(_pipeline(monkeypatch, 100, context=2048, memory_check="off")).context == 2048
    with pytest.raises(InputError, match="--memory-check off"):
        _pipeline(monkeypatch, 100)


def test_auto_takes_what_fits_and_says_so(monkeypatch: pytest.MonkeyPatch):
    small, large = (_pipeline(monkeypatch, mib, context="auto", concurrent=64) for mib in (1400, 64_000))
    found = _options(small).context

    assert isinstance(found, int)
    assert _budget(context=found, concurrent=64) <= 0.75 * 1400 * MIB < _budget(context=found + 256, concurrent=64)
    assert f"A request may have {found:,} of the target's" in small.note
    assert _options(large).context == 2048
    assert large.note == ""


def test_caches_take_what_the_models_leave(monkeypatch: pytest.MonkeyPatch):
    pipeline = _pipeline(monkeypatch, 2000, arena_memory=1024, prefix_cache_memory=512)
    options = _options(pipeline)

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


def test_what_fits_is_started_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    pipeline = _pipeline(monkeypatch, 64_000, arena_memory=1024)

    assert (_options(pipeline).arena_memory, _options(pipeline).context, pipeline.note) == (1024, 0, "")


def test_auto_that_fits_nothing_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"64 × 1,024 tokens.*--concurrent (\d+)"):
        _pipeline(monkeypatch, 1150, context="auto", concurrent=64)
    assert _options(_pipeline(monkeypatch, 100, context="auto", memory_check="off")).context == 1024


def test_what_the_refusal_of_an_unasked_context_advises_is_started(monkeypatch: pytest.MonkeyPatch):
    enough = -(-_budget() * 4 // 3 // MIB)
    with pytest.raises(InputError, match="What fits: --context 1792 with --concurrent 1"):
        _pipeline(monkeypatch, enough - 1)

    assert _options(_pipeline(monkeypatch, enough - 1, context=1792, concurrent=1)).context == 1792


def test_a_mac_is_asked_what_it_recommends_only_where_that_matters(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(memory_check, "gpu_working_set", lambda: asked.append(1) or 600 * MIB)
    _pipeline(monkeypatch, 64_000)

    assert not asked
    with pytest.raises(InputError, match=r"may use 0\.6 GiB"):
        _pipeline(monkeypatch, 1500)


@pytest.mark.parametrize("wrong", [-1, "all", 1 << 30])
def test_a_wrong_context_is_an_input_error(wrong: object):
    with pytest.raises(InputError, match="context"):
        Pipeline(str(DEMO_TARGET), context=wrong)
