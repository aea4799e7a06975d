"""The disk cache with real processes: a new pipeline takes up the turns of an earlier one, and tokens stay the same."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator import Pipeline, SamplingParams
from orchestrator.api.validation import IneffectiveOption
from orchestrator.cli.commands.cache import cache as cache_command
from orchestrator.cli.commands.cache import cached_models
from orchestrator.runtime.notices import Notice
from protocol.kv.cache_files import disk_cache_folder
from target_worker.disk_cache.kept_prefixes import LEAST_TOKENS
from tests.conftest import Reference
from tests.support.models.architectures import write_tiny
from tests.support.paths import DEMO_TARGET
from tests.support.processes import mark, members, remains, until

TOKENS = [1000 + place * 7 % 3000 for place in range(700)]
COLD, HOT = SamplingParams(max_tokens=24), SamplingParams(temperature=1.0, seed=3, max_tokens=24)
SLOW = pytest.mark.slow
LONG = {"max_position_embeddings": 4096}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rows": ("", {}, 512),
    "quantized rows": ("", {"kv_bits": 8}, 512),
    "a recurrence alone": ("mamba2", {}, 700),
    "recurrences and attention": ("qwen3_next", {}, 700),
    "windows and attention": ("gemma3_text", {}, 512),
    "a recurrence alone, below trees": ("rwkv7", {}, 700),
    "convolutions and attention": ("lfm2", {}, 700),
}
"""What is kept: a random model, or the demo target; its options; the least tokens that are taken up."""


class Interrupted(Exception):
    """Somebody does not wait for a prompt to be read."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def files(suffix: str = "") -> list[Path]:
    return [file for file in disk_cache_folder().rglob(f"*{suffix}") if file.is_file() and file.name != "model.json"]


def opened(target: str = str(DEMO_TARGET), **options: Any) -> Pipeline:
    return Pipeline(target, draft_engine="ngram", **{"disk_cache": 1.0, **options})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if place < 5 else SLOW, id=kind) for place, kind in enumerate(KINDS)]
)
def test_a_new_pipeline_takes_up_the_turns_of_an_earlier_one(home: Path, reference: Reference, kind: str):
    name, options, least = KINDS[kind]
    target = str(write_tiny(home / name, name, **LONG)) if name else str(DEMO_TARGET)
    with opened(target, **options) as pipeline:
        firsts = [pipeline.generate(TOKENS, params) for params in (COLD, HOT)]
        # A disk that is slow to say what is there keeps fewer turns.
        until(lambda: len(files()) >= 2 or pipeline.generate(TOKENS, COLD).tokens == ())
    turns = [[*TOKENS, *first.tokens, *range(2000, 2040)] for first in firsts]
    asked = list(zip(turns, (COLD, HOT), strict=True))
    with opened(target, **options) as pipeline:
        processes = mark(pipeline)
        taken = [pipeline.generate(turn, params) for turn, params in asked]
    assert remains(processes) == []
    if (name, options) == ("", {}):
        alone = [reference(turn, params).tokens for turn, params in asked]
    else:
        with opened(target, disk_cache=0.0, arena_memory=0, **options) as pipeline:
            alone = [pipeline.generate(turn, params).tokens for turn, params in asked]

    assert [result.tokens for result in taken] == alone
    assert all(result.statistics.adopted_tokens >= least for result in taken)
    assert {file.stat().st_mode & 0o777 for file in files()} == {0o600}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ends", ["its client leaves", "the pipeline ends"])
@pytest.mark.parametrize("kind", ["rows", "recurrences and attention"])
def test_a_prompt_that_was_interrupted_goes_on_where_it_was_read(home: Path, kind: str, ends: str):
    name, prompt = KINDS[kind][0], TOKENS * 2
    target = str(write_tiny(home / name, name, **LONG)) if name else str(DEMO_TARGET)
    # At a Mac's pace the whole prompt takes seconds, so on a fast machine too something is left of it.
    with suppress(Interrupted), opened(target, prefill_step_size=8, pace="m4-16gb-qwen2.5-3b") as pipeline:

        def interrupt(tokens: int, *_: int) -> None:
            if tokens >= LEAST_TOKENS:
                if ends == "the pipeline ends":
                    pipeline.close()
                raise Interrupted

        with pipeline.stream(prompt, COLD) as stream:
            stream.watch_reading(interrupt)
            list(stream)
    with opened(target) as pipeline:
        assert LEAST_TOKENS <= pipeline.generate(prompt, COLD).statistics.adopted_tokens < len(prompt) - 1


@pytest.mark.thorough
def test_a_torn_file_costs_a_prefill_and_no_token():
    with opened() as pipeline:
        expected = pipeline.generate(TOKENS, COLD).tokens
        until(lambda: len(files(".rows")) == 2)
    for file in files(".rows"):
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
    assert (warnings, files()) == (1, [])


@pytest.mark.thorough
def test_a_killed_target_goes_on_from_the_disk(home: Path):
    with opened(str(write_tiny(home / "mamba2", "mamba2", **LONG))) as pipeline:
        expected = pipeline.generate(TOKENS, HOT).tokens
        until(lambda: len(files(".state")) >= 3)
        os.kill(members(mark(pipeline))["target_worker"], signal.SIGKILL)
        result = pipeline.generate(TOKENS, HOT)

    assert result.tokens == expected
    assert result.statistics.adopted_tokens >= 512


@pytest.mark.thorough
def test_two_pipelines_may_use_one_folder_and_the_list_shows_it():
    with opened() as one, opened() as other:
        texts = [pipeline.generate(TOKENS, HOT).tokens for pipeline in (one, other, one)]
        until(lambda: len(files(".rows")) == 2)

    assert texts[0] == texts[1] == texts[2]
    (kept,) = cached_models()
    assert kept.chunks == len(files())
    assert "demo" in CliRunner().invoke(cache_command, ["list"]).output


@pytest.mark.thorough
def test_nothing_is_kept_unless_it_is_asked_for_nor_by_a_pipeline_that_keeps_no_kv():
    with Pipeline(draft_engine="ngram") as pipeline:
        pipeline.generate(TOKENS, COLD)
    with pytest.warns(IneffectiveOption):
        pipeline = opened(arena_memory=0)
    with pipeline:
        pipeline.generate(TOKENS, COLD)

    assert not disk_cache_folder().exists()
