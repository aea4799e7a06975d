"""The draft may do what it likes, and be far away: the tokens are those of target-only decoding. Real processes."""

import sys
from collections.abc import Iterator

import pytest

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.runtime.link_emulation import EmulatedLink
from tests.conftest import Reference
from tests.support.chaotic_draft import MODES
from tests.support.paths import ROOT
from tests.support.processes import until

PROMPT = "def quicksort(items):"
EXAMPLE = ROOT / "docs" / "inside" / "own_draft.py"
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


@pytest.mark.thorough
def test_tokens_are_the_targets_over_a_bad_link(reference: Reference):
    with Pipeline(draft_link=EmulatedLink(delay=0.004, loss=0.1)) as pipeline:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=160, temperature=temperature, seed=4)
            result = pipeline.generate(PROMPT, params)

            assert result.tokens == reference(PROMPT, params).tokens
            assert result.statistics.draft_busy > 0


def test_the_documented_example_draft_is_used_and_exact(reference: Reference):
    params = SamplingParams(max_tokens=48)
    prompt = "for i in range(3):\n    print(i)\n"
    results: list[Result] = []
    with Pipeline(draft_command=(sys.executable, str(EXAMPLE)), lookup="off") as pipeline:
        # The target decodes alone until the draft is up, and on a busy machine a short text may be over before.
        until(lambda: results.append(pipeline.generate(prompt, params)) or results[-1].statistics.acceptance_rate)

    assert results[-1].tokens == reference(prompt, params).tokens
