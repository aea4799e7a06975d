"""Targets with recurrent and convolution layers, in real processes: their tokens are those of plain decoding, whatever
happens meanwhile.

The demo draft guesses badly for a random model, so nearly every round undoes guesses.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from orchestrator import Pipeline, SamplingParams
from tests.support.models.architecture_folders import write_model
from tests.support.paths import DEMO_DRAFT
from tests.support.processes import mark, members, remains

PROMPT = (*range(2, 90), *range(2, 60))
GREEDY = SamplingParams(max_tokens=60)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=60)
KINDS = ["qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "rwkv7"))]
"""Delta rule and attention; convolutions; a state without trees."""


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp("kinds") / request.param)


@pytest.fixture(scope="module")
def pipeline(target: Path) -> Iterator[Pipeline]:
    with Pipeline(str(target), str(DEMO_DRAFT)) as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[Pipeline]:
    """Decodes token by token, and prefills every prompt whole."""
    with Pipeline(str(target), strategy="ar", prefix_cache_memory=0) as pipeline:
        yield pipeline


def tokens(pipeline: Pipeline, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return list(pipeline.generate(prompt, params).tokens)


def test_greedy_tokens_are_those_of_mlx_lm(pipeline: Pipeline, plain: Pipeline, target: Path):
    model, _ = load_model(target)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=GREEDY.max_tokens)
    expected = [int(token) for token, _ in steps]

    assert tokens(plain, PROMPT, GREEDY) == expected
    assert tokens(pipeline, PROMPT, GREEDY) == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_target_loses_no_token(pipeline: Pipeline, plain: Pipeline, params: SamplingParams):
    worker = members(mark(pipeline))["target_worker"]
    with pipeline.stream(PROMPT, params) as stream:
        for count, _ in enumerate(stream):
            if count == 1:
                os.kill(worker, signal.SIGKILL)
        assert stream.result is not None

    assert members(mark(pipeline))["target_worker"] != worker
    assert list(stream.result.tokens) == tokens(plain, PROMPT, params)


def test_right_guesses_are_kept(target: Path, plain: Pipeline):
    """The target's own are, beside others that are undone."""
    with Pipeline(str(target), str(target)) as pipeline:
        result = pipeline.generate(PROMPT, SAMPLED)

    assert list(result.tokens) == tokens(plain, PROMPT, SAMPLED)
    assert result.statistics.acceptance_rate is not None
    assert result.statistics.acceptance_rate > 0.5


def test_turns_with_a_shared_and_with_an_edited_prefix(pipeline: Pipeline, plain: Pipeline):
    answer = tokens(pipeline, PROMPT, SAMPLED)
    turn, edited = (*PROMPT, *answer, *range(40, 70)), (*PROMPT[:70], *range(60, 120))
    for prompt in (turn, edited, PROMPT[:-1], turn):
        assert tokens(pipeline, prompt, SAMPLED) == tokens(plain, prompt, SAMPLED)


def test_four_requests_at_once(pipeline: Pipeline, plain: Pipeline):
    prompts = [PROMPT[begin:] for begin in (0, 10, 20, 30)]
    with ThreadPoolExecutor(len(prompts)) as executor:
        found = list(executor.map(lambda prompt: tokens(pipeline, prompt, SAMPLED), prompts))

    assert found == [tokens(plain, prompt, SAMPLED) for prompt in prompts]
