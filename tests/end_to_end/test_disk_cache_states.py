"""The disk cache of targets whose KV can't be cut to any token, with real processes: a new pipeline takes up the states
of an earlier one, and tokens stay the same."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from orchestrator import Pipeline, SamplingParams
from orchestrator.api.sampling.ineffective import IneffectiveOption
from protocol.kv.cache_files import disk_cache_folder
from tests.support.models.architectures import configuration, tiny
from tests.support.paths import DEMO_TARGET
from tests.support.processes import mark, members, remains, until

TOKENS = [1000 + place * 7 % 3000 for place in range(600)]
BOTH = SamplingParams(max_tokens=24), SamplingParams(temperature=1.0, seed=3, max_tokens=24)
KINDS = {
    "mamba2": "a recurrence alone",
    "qwen3_next": "recurrences and attention",
    "gemma3_text": "windows and attention",
    "rwkv7": "a recurrence alone, below trees",
    "lfm2": "convolutions and attention",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def random_target(home: Path, name: str) -> str:
    """With the demo target's tokenizer."""
    folder = home / name
    shutil.copytree(DEMO_TARGET, folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    weights = dict(tree_flatten(tiny(name, vocab_size=vocabulary).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = configuration(name, vocab_size=vocabulary)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return str(folder)


def opened(target: str, **options: Any) -> Pipeline:
    return Pipeline(target, draft_engine="ngram", **{"disk_cache": 1.0, **options})


def files(suffix: str = "") -> list[Path]:
    return [file for file in disk_cache_folder().rglob(f"*{suffix}") if file.is_file() and file.name != "model.json"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if place < 3 else pytest.mark.slow, id=kind) for place, kind in enumerate(KINDS)],
)
def test_a_new_pipeline_goes_on_from_the_longest_state(home: Path, kind: str):
    target = random_target(home, kind)
    with opened(target) as pipeline:
        firsts = [pipeline.generate(TOKENS, params) for params in BOTH]
        until(lambda: len(files()) >= 2)
    turns = [[*TOKENS, *first.tokens, *range(2000, 2040)] for first in firsts]
    with opened(target) as pipeline:
        name = mark(pipeline)
        taken = [pipeline.generate(turn, params) for turn, params in zip(turns, BOTH, strict=True)]
    assert remains(name) == []
    with opened(target, disk_cache=0.0, arena_memory=0) as pipeline:
        alone = [pipeline.generate(turn, params) for turn, params in zip(turns, BOTH, strict=True)]

    assert [result.tokens for result in taken] == [result.tokens for result in alone]
    least = 512 if kind == "gemma3_text" else len(TOKENS)
    assert all(result.statistics.adopted_tokens >= least for result in taken)
    assert [result.statistics.adopted_tokens for result in alone] == [0, 0]


@pytest.mark.thorough
def test_a_killed_target_goes_on_from_the_disk(home: Path):
    target = random_target(home, "mamba2")
    with opened(target) as pipeline:
        expected = pipeline.generate(TOKENS, BOTH[1]).tokens
        until(lambda: len(files(".state")) == 3)
        os.kill(members(mark(pipeline))["target_worker"], signal.SIGKILL)
        result = pipeline.generate(TOKENS, BOTH[1])

    assert result.tokens == expected
    assert result.statistics.adopted_tokens >= 512


@pytest.mark.thorough
def test_a_pipeline_that_keeps_no_kv_keeps_none_on_disk(home: Path):
    with pytest.warns(IneffectiveOption):
        pipeline = opened(random_target(home, "mamba2"), arena_memory=0)
    with pipeline:
        pipeline.generate(TOKENS, BOTH[0])

    assert not disk_cache_folder().exists()
