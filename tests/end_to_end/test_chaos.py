"""The draft may do what it likes: the tokens are those of target-only decoding. Real processes."""

import sys
from collections.abc import Iterator

import pytest

from orchestrator import Pipeline, SamplingParams
from tests.conftest import Reference
from tests.support.chaotic_draft import MODES

PROMPT = "def quicksort(items):"
SLOWLY = [pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("sd", "ssd")]


def chaotic(mode: str, **options) -> Pipeline:
    return Pipeline(draft_command=(sys.executable, "-m", "tests.support.chaotic_draft", mode), **options)


@pytest.fixture(scope="module", params=["adaptive", *SLOWLY])
def strategy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[*MODES])
def pipeline(strategy: str, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    with chaotic(request.param, strategy=strategy) as pipeline:
        yield pipeline


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_those_of_the_target_alone(pipeline: Pipeline, reference: Reference, temperature: float):
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=24)

    result = pipeline.generate(PROMPT, params)

    assert result.tokens == reference(PROMPT, params).tokens
    assert result.finish_reason == "length"


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["silent", "slow"])
def test_turns_that_a_draft_does_not_take_are_not_waited_for(reference: Reference, mode: str):
    params = SamplingParams(max_tokens=24)
    with chaotic(mode, strategy="sd") as pipeline:
        assert pipeline.generate(PROMPT, params).tokens == reference(PROMPT, params).tokens
