"""Statistics over prompts: medians, quartiles, gaps between arrivals, bootstrap intervals. Pure; draws are seeded."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

BURST_SECONDS = 2e-4
"""Tokens that arrive closer together than this arrive at once."""
FEWEST_PROMPTS = 6
"""Below it no 95% interval of a median exists without assumptions: 2 * 0.5**5 > 0.05."""
_RESAMPLES = 2000


class Interval(NamedTuple):
    """Two bounds."""

    low: float
    high: float


class Ratio(NamedTuple):
    """A median of paired ratios, and its 95% interval; None with fewer than FEWEST_PROMPTS prompts."""

    median: float
    interval: Interval | None


def medians_by_prompt(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Pairs of a prompt and a value; the median of each prompt's values, in the order of the prompts."""
    found: dict[int, list[float]] = defaultdict(list)
    for prompt, value in values:
        found[prompt].append(value)
    return {prompt: median(found[prompt]) for prompt in sorted(found)}


def quartiles(values: Iterable[float]) -> Interval:
    """The lower and the upper quartile, linearly interpolated. Of one value: itself."""
    low, high = np.quantile(list(values), (0.25, 0.75)).tolist()
    return Interval(low, high)


def paired_ratio(ratios: Mapping[int, float], seed: int = 0) -> Ratio | None:
    """Of one ratio a prompt. None without any."""
    values = list(ratios.values())
    if not values:
        return None
    return Ratio(median(values), bootstrap_interval(values, seed) if len(values) >= FEWEST_PROMPTS else None)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """95% percentile interval of the median: Efron and Tibshirani, An Introduction to the Bootstrap, section 13.3."""
    known = np.asarray(values)
    drawn = np.random.default_rng(seed).integers(len(known), size=(_RESAMPLES, len(known)))
    low, high = np.quantile(np.median(known[drawn], axis=1), (0.025, 0.975)).tolist()
    return Interval(low, high)


def gaps(arrivals: Sequence[float]) -> list[float]:
    """Seconds between successive arrivals at the client. Tokens of one burst arrive at once."""
    steps = (after - before for before, after in pairwise(arrivals))
    return [step for step in steps if step >= BURST_SECONDS]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values are below, linearly interpolated. None without values."""
    return float(np.quantile(values, share)) if values else None
