"""The disk cache with real processes: a new pipeline takes up the turns of an earlier one, and tokens stay the same."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.cli.commands.cache import cached_models
from orchestrator.runtime.notices import Notice
from protocol.kv.cache_files import disk_cache_folder
from tests.conftest import Reference
from tests.support.processes import mark, remains, until

TOKENS = [1000 + place * 7 % 3000 for place in range(700)]
COLD, HOT = SamplingParams(max_tokens=40), SamplingParams(temperature=1.0, seed=3, max_tokens=24)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def chunks() -> int:
    return sum(model.chunks for model in cached_models())


def opened(**options: Any) -> Pipeline:
    return Pipeline(disk_cache=1.0, draft_engine="ngram", **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("params", [COLD, HOT], ids=["T=0", "T=1"])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_new_pipeline_takes_up_the_turns_of_an_earlier_one(reference: Reference, params: SamplingParams, bits: int):
    with opened(kv_bits=bits) as pipeline:
        first = pipeline.generate(TOKENS, params)
        until(lambda: chunks() == 2)
    turn = [*TOKENS, *first.tokens, *range(2000, 2050)]
    with opened(kv_bits=bits) as pipeline:
        name = mark(pipeline)
        second = pipeline.generate(turn, params)
        again = pipeline.generate(turn, params)
    with Pipeline(draft_engine="ngram", kv_bits=bits) as pipeline:
        alone = pipeline.generate(turn, params)

    assert second.tokens == again.tokens == alone.tokens
    assert first.statistics.adopted_tokens == alone.statistics.adopted_tokens == 0
    assert second.statistics.adopted_tokens == 512
    assert remains(name) == []
    if bits == 16:
        assert first.tokens == reference(TOKENS, params).tokens


@pytest.mark.thorough
def test_a_torn_file_costs_a_prefill_and_no_token():
    with opened() as pipeline:
        expected = pipeline.generate(TOKENS, COLD).tokens
        until(lambda: chunks() == 2)
    for file in disk_cache_folder().rglob("*.rows"):
        file.write_bytes(file.read_bytes()[:-4] + b"torn")
    with opened() as pipeline:
        result = pipeline.generate(TOKENS, COLD)
        assert pipeline.state().kv_warnings == 1

    assert (result.tokens, result.statistics.adopted_tokens) == (expected, 0)


@pytest.mark.thorough
def test_a_folder_that_others_can_enter_is_not_used_and_requests_go_on():
    disk_cache_folder().mkdir(parents=True, mode=0o755)
    told: list[Notice] = []
    with opened(on_notice=told.append) as pipeline:
        first, second = (pipeline.generate(TOKENS, COLD) for _ in range(2))
        warnings = pipeline.state().kv_warnings

    assert first.tokens == second.tokens
    assert ["chmod 700" in notice.text for notice in told] == [True]
    assert warnings == 1
    assert chunks() == 0


@pytest.mark.thorough
def test_two_pipelines_may_use_one_folder():
    with opened() as one, opened() as other:
        texts = [pipeline.generate(TOKENS, HOT).tokens for pipeline in (one, other, one)]
        until(lambda: chunks() == 2)

    assert texts[0] == texts[1] == texts[2]
    assert len(cached_models()) == 1


@pytest.mark.thorough
def test_nothing_is_kept_unless_it_is_asked_for():
    with Pipeline(draft_engine="ngram") as pipeline:
        pipeline.generate(TOKENS, COLD)

    assert not disk_cache_folder().exists()
