"""Whatever the strategy, sampling and company: the tokens are those of target-only decoding. Real processes."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from orchestrator import AsyncClient, Client, Pipeline, SamplingParams
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.grammar import Thought
from tests.conftest import Reference
from tests.support.paths import DEMO_TARGET
from tests.support.processes import until

PROMPTS = (
    "def quicksort(items):",
    "import os\nimport sys\n\n",
    "class Stack:\n    def push(self, item):\n",
    "for i in ",
)
CODEC = TextCodec(DEMO_TARGET)
FILTERS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "logit_bias": {"logit_bias": {221: 4.0, 815: -8.0}},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": -0.3},
    "schema": {"json_schema": {"type": "array", "items": {"enum": ["a", "bc", 1, None]}}, "logprobs": 2},
    "closed thought": {
        "closed_thought": Thought(((221,),), (815,), opened=True, again=True),
        "logit_bias": dict.fromkeys(CODEC.eos, 12.0),
    },
    "all at once": {"top_p": 0.95, "top_k": 200, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {344: 2.0}},
}
CONTEXT = 2048


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """A prompt that no tokenizer made."""
    return tuple(random.Random(seed).choices(range(1, 4096), k=count))


@pytest.fixture(
    scope="module",
    params=["sd", "ssd", "adaptive"],
)
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    """One pipeline a strategy, used by all tests in turn."""
    with Pipeline(strategy=request.param) as pipeline:
        yield pipeline


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_equal_those_of_the_target_alone(pipeline: Pipeline, reference: Reference, temperature: float):
    for prompt in PROMPTS[:2]:
        for seed in (1, 2) if temperature else (0,):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=24)

            assert pipeline.generate(prompt, params).tokens == reference(prompt, params).tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft_tokens", [1, 7])
def test_a_request_may_have_a_k_of_its_own(pipeline: Pipeline, reference: Reference, draft_tokens: int):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24)

    def depths() -> Sequence[float]:
        own = pipeline.generate(PROMPTS[1], replace(params, draft_tokens=draft_tokens))
        assert own.tokens == reference(PROMPTS[1], params).tokens
        return own.statistics.acceptance_by_depth

    depths()
    if pipeline.strategy == "sd":
        # On a busy machine the draft may be late.
        assert len(until(depths)) <= draft_tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("filters", FILTERS.values(), ids=[*FILTERS])
def test_filters_do_not_change_that(pipeline: Pipeline, reference: Reference, filters: dict):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=16, **filters)
    expected = reference(PROMPTS[2], params)

    found = pipeline.generate(PROMPTS[2], params)

    assert found.tokens == expected.tokens
    assert [one.chosen for one in found.token_logprobs] == pytest.approx(
        [one.chosen for one in expected.token_logprobs], abs=1e-3
    )


@pytest.mark.parametrize("border", [3, 7])
def test_a_stop_string_across_a_token_border_ends_the_text_before_it(
    pipeline: Pipeline, reference: Reference, border: int
):
    params = SamplingParams(max_tokens=40)
    whole = reference(PROMPTS[0], params)
    left, right = CODEC.decode(whole.tokens[:border]), CODEC.decode(whole.tokens[border:])
    stop = left[-2:] + right[:2]

    result = pipeline.generate(PROMPTS[0], replace(params, stop=stop))

    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert result.statistics.generated_tokens == len(result.tokens)


@pytest.mark.thorough
def test_a_stop_string_in_the_last_commit_cuts_the_count_too(pipeline: Pipeline, reference: Reference):
    whole = reference(PROMPTS[0], SamplingParams(max_tokens=40))
    texts = [CODEC.decode(whole.tokens[:count]) for count in range(41)]
    stops = [(count, texts[count + 1][len(texts[count]) :]) for count in range(40)]
    fresh = [(count, stop) for count, stop in stops if stop.strip() and stop not in texts[count]]
    assert fresh

    for count, stop in fresh:
        for surplus in (1, 2, 3):
            params = SamplingParams(max_tokens=count + 1 + surplus, stop=stop)
            result = pipeline.generate(PROMPTS[0], params)

            assert result.finish_reason == "stop"
            assert result.statistics.generated_tokens == len(result.tokens)


def test_the_end_token_is_the_last(pipeline: Pipeline, reference: Reference):
    (end,) = CODEC.eos
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, logit_bias={end: 9.0})

    result = pipeline.generate(PROMPTS[1], params)

    assert result.tokens == reference(PROMPTS[1], params).tokens
    assert result.finish_reason == "stop"
    assert result.tokens.index(end) == len(result.tokens) - 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [1, 600, CONTEXT - 9, pytest.param(CONTEXT - 1, marks=pytest.mark.slow)])
def test_prompts_of_any_length_are_continued_until_the_context_is_full(
    pipeline: Pipeline, reference: Reference, length: int
):
    params = SamplingParams(temperature=0.7, seed=6, max_tokens=16)
    prompt = tokens(length, seed=length)

    result = pipeline.generate(prompt, params)

    assert result.tokens == reference(prompt, params).tokens
    assert (len(result.tokens), result.finish_reason) == (min(16, CONTEXT - length), "length")


@pytest.mark.sampled(1)
def test_threads_and_tasks_do_not_disturb_one_another(pipeline: Pipeline, reference: Reference):
    asked = [
        (PROMPTS[seed % len(PROMPTS)], SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=20))
        for seed in range(6)
    ]
    expected = [reference(prompt, params).tokens for prompt, params in asked]

    async def all_at_once():
        client = AsyncClient(pipeline.address)
        try:
            return await asyncio.gather(*(client.generate(prompt, params) for prompt, params in asked))
        finally:
            client.close()

    with ThreadPoolExecutor(len(asked)) as pool:
        results = list(pool.map(lambda one: Client(pipeline.address).generate(*one), asked))

    assert [result.tokens for result in results] == expected
    assert [result.tokens for result in asyncio.run(all_at_once())] == expected


@pytest.mark.thorough
def test_a_cancelled_request_keeps_what_it_had_and_does_not_disturb_the_next(pipeline: Pipeline, reference: Reference):
    params = SamplingParams(temperature=0.7, seed=8, max_tokens=400)
    with pipeline.stream(PROMPTS[0], params) as stream:
        for count, _ in enumerate(stream):
            if count == 3:
                stream.cancel()

    assert stream.result is not None
    assert stream.result.finish_reason == "cancelled"
    short = replace(params, max_tokens=24)
    expected = reference(PROMPTS[0], short).tokens
    assert stream.result.tokens[:24] == expected[: len(stream.result.tokens)]
    assert pipeline.generate(PROMPTS[0], short).tokens == expected
