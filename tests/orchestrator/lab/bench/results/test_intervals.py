"""Laws of the bench's statistics: medians by prompt, quartiles, bootstrap intervals, gaps between arrivals."""

from statistics import median

import numpy as np
import pytest

from orchestrator.lab.bench.figures import (
    BURST_SECONDS,
    FEWEST_PROMPTS,
    bootstrap_interval,
    gaps,
    medians_by_prompt,
    paired_ratio,
    percentile,
    quartiles,
)


def _ratios(count: int, seed: int) -> list[float]:
    return np.random.default_rng(seed).lognormal(0.2, 0.3, count).tolist()


@pytest.mark.parametrize("count", [6, 7, 33, 198])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_interval_contains_the_median_of_the_ratios(count: int, seed: int):
    ratios = _ratios(count, seed)

    low, high = bootstrap_interval(ratios)

    assert min(ratios) <= low <= median(ratios) <= high <= max(ratios)


def test_a_shuffled_pairing_widens_the_interval():
    random = np.random.default_rng(7)
    baseline = random.uniform(20.0, 80.0, 40)
    ours = 1.3 * baseline * random.uniform(0.97, 1.03, 40)

    paired, shuffled = (
        bootstrap_interval((ours / other).tolist()) for other in (baseline, random.permutation(baseline))
    )

    assert shuffled.high - shuffled.low > 5 * (paired.high - paired.low)


def test_95_of_100_intervals_contain_the_median_of_the_population():
    population = np.exp(0.2)
    intervals = [bootstrap_interval(_ratios(33, seed)) for seed in range(200)]

    covered = sum(interval.low <= population <= interval.high for interval in intervals)

    assert 0.90 <= covered / len(intervals) <= 0.99


def test_a_ratio_of_few_prompts_has_no_interval():
    ratios = dict(enumerate(_ratios(FEWEST_PROMPTS, seed=9)))

    whole, fewer = paired_ratio(ratios), paired_ratio({prompt: ratios[prompt] for prompt in range(FEWEST_PROMPTS - 1)})

    assert whole is not None
    assert whole.interval is not None
    assert fewer is not None
    assert fewer.interval is None
    assert paired_ratio({}) is None


def test_repeats_of_a_prompt_count_once():
    values = [(0, 1.0), (0, 2.0), (0, 9.0), (1, 5.0)]

    assert medians_by_prompt(values) == {0: 2.0, 1: 5.0}


def test_half_of_the_values_are_between_the_quartiles():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)
    assert quartiles([3.0]) == (3.0, 3.0)


def test_tokens_of_a_burst_arrive_at_once():
    near = BURST_SECONDS / 10

    assert gaps([1.0, 1.0, 1.0 + near, 1.5, 1.5 + near, 1.7]) == pytest.approx([0.5, 0.2], abs=3 * near)


def test_one_token_has_no_gap():
    assert gaps([1.0]) == gaps([]) == []
    assert percentile([], 0.95) is None


def test_a_percentile_is_above_its_share_of_the_values():
    assert percentile(list(range(101)), 0.95) == 95.0
