"""A target with sliding windows, in real processes: its tokens are those of mlx-lm, whatever happens meanwhile."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from orchestrator import Pipeline, SamplingParams
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import mark, members, remains

WINDOW = 24
PROMPT = tuple(range(2, 152))
"""Six windows."""
PARAMS = SamplingParams(max_tokens=80)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target, half of whose layers see the last tokens only."""
    folder = tmp_path_factory.mktemp("windows") / "target"
    shutil.copytree(DEMO_TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    windows = {"layer_types": kinds[: config["num_hidden_layers"]], "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config | windows))
    return folder


@pytest.fixture(scope="module")
def pipeline(target: Path) -> Iterator[Pipeline]:
    with Pipeline(str(target), str(DEMO_DRAFT)) as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


@pytest.fixture(scope="module")
def expected(target: Path) -> list[int]:
    """mlx-lm's own greedy tokens."""
    model, _ = load_model(target)
    model.set_dtype(mx.float32)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=PARAMS.max_tokens or 0)
    return [int(token) for token, _ in steps]


@pytest.mark.thorough
def test_greedy_tokens_are_those_of_mlx_lm(pipeline: Pipeline, expected: list[int]):
    result = pipeline.generate(PROMPT, PARAMS)

    assert list(result.tokens) == expected
    assert result.statistics.acceptance_rate


@pytest.mark.thorough
def test_sampled_tokens_are_those_of_plain_decoding(pipeline: Pipeline, target: Path):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60)
    with Pipeline(str(target), strategy="ar") as plain:
        alone = plain.generate(PROMPT, params)

    assert pipeline.generate(PROMPT, params).tokens == alone.tokens


@pytest.mark.thorough
def test_a_killed_target_goes_on_from_what_it_saved(pipeline: Pipeline, expected: list[int]):
    with pipeline.stream(PROMPT, PARAMS) as stream:
        for count, _ in enumerate(stream):
            if count == 1:
                os.kill(members(mark(pipeline))["target_worker"], signal.SIGKILL)
        assert stream.result is not None

    assert list(stream.result.tokens) == expected


@pytest.mark.thorough
def test_turns_with_a_shared_and_with_an_edited_prefix(pipeline: Pipeline, target: Path):
    """The edit lies many windows before the end, so rows before the window are needed again."""
    shared, edited = (*PROMPT, *range(40, 80)), (*PROMPT[:90], *range(60, 120))
    found = [pipeline.generate(text, PARAMS).tokens for text in (shared, edited)]
    with Pipeline(str(target), strategy="ar", prefix_cache_memory=0) as fresh:
        assert found == [fresh.generate(text, PARAMS).tokens for text in (shared, edited)]


@pytest.mark.thorough
def test_four_requests_at_once(pipeline: Pipeline):
    texts = [PROMPT[begin:] for begin in (0, 10, 20, 30)]
    alone = [pipeline.generate(text, PARAMS).tokens for text in texts]
    found: dict[int, object] = {}

    def ask(index: int) -> None:
        found[index] = pipeline.generate(texts[index], PARAMS).tokens

    threads = [Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [found[index] for index in range(4)] == alone
