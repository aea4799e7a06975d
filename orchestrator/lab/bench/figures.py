"""From measurements to the figures of the tables: medians, quartiles, ratios, categories. Pure arithmetic."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from orchestrator.core.request_stats import TOLERATED_OVERRUNS
from orchestrator.lab.bench.contender import (
    LOOKUP_ALONE,
    PLAIN_OURS,
    WITHOUT_LOOKUP,
    Measurement,
    Setting,
    TimedGeneration,
    deviating,
    is_checked,
    line_and_draft_tokens,
)

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


FIGURES: dict[str, Callable[[TimedGeneration], float | None]] = {
    "tokens_per_round": lambda one: one.tokens_per_round,
    "hit_rate": lambda one: one.statistics and one.statistics.hit_rate,
    "acceptance_rate": lambda one: one.acceptance_rate,
    "target_busy": lambda one: one.statistics and one.statistics.target_busy,
    "draft_busy": lambda one: one.statistics and one.statistics.draft_busy,
    "overhead_per_round": lambda one: one.statistics and one.statistics.overhead_per_round,
    "time_to_first_token": lambda one: one.time_to_first_token,
    "total_time": lambda one: one.total_time,
    "stretch": lambda one: one.pace and one.pace.stretch,
}
"""Of a generation; of a row their medians over prompts, turns and repeats. None: no such figure."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One contender at one temperature. Its speed is the median over prompts of each prompt's median over repeats."""

    measurements: Sequence[Measurement]
    best_baseline: str | None
    """mlx-lm's fastest contender at this temperature over all prompts, plain or speculative."""
    ratios: Mapping[str, Ratio]
    """Of tokens/s to those of mlx-lm's plain decoding, its best K, and our own plain decoding, by their names."""
    deviating: int
    """Generations that differ from their reference."""
    ties: tuple[float, ...]
    """Of these, the gaps of those that part from it at a near-tie, which rounding decides: in standard deviations of
    the logits. If any other differs, the other figures mean nothing."""

    @property
    def contender(self) -> str:
        return self.measurements[0].contender

    @property
    def draft_tokens(self) -> int | None:
        """Its K, if that is fixed."""
        return line_and_draft_tokens(self.contender)[1]

    @property
    def temperature(self) -> float:
        return self.measurements[0].setting.temperature

    @property
    def rival(self) -> bool:
        """Other software, whose tokens are not compared."""
        return self.measurements[0].family == "rival"

    @property
    def generations(self) -> list[TimedGeneration]:
        return [one.generation for one in self.measurements]

    @cached_property
    def speeds(self) -> list[float]:
        """Tokens/s of each prompt."""
        return prompt_speeds(self.measurements)

    @property
    def tokens_per_second(self) -> float:
        return median(self.speeds)

    @property
    def quartiles(self) -> Interval:
        """Of tokens/s, over prompts."""
        return quartiles(self.speeds)

    def median(self, figure: str) -> float | None:
        """Of a figure's name in FIGURES."""
        known = [value for one in self.generations if (value := FIGURES[figure](one)) is not None]
        return median(known) if known else None

    def inter_token(self, share: float) -> float | None:
        """A percentile of the seconds between successive arrivals at the client, over all generations. Tokens of a
        round arrive at once."""
        return percentile([gap for one in self.generations for gap in gaps(one.arrivals)], share)

    @property
    def checked(self) -> int:
        """Generations whose tokens were compared with a reference."""
        return sum(map(is_checked, self.measurements))

    @property
    def overruns(self) -> float | None:
        """Share of the paced forwards that took longer than on the profile's device."""
        paces = [one.pace for one in self.generations if one.pace is not None]
        forwards = sum(pace.forwards for pace in paces)
        return sum(pace.overruns for pace in paces) / forwards if forwards else None

    @property
    def representative(self) -> bool:
        """The contender kept its pace, if it has one."""
        return (self.overruns or 0.0) <= TOLERATED_OVERRUNS

    @property
    def exact(self) -> bool:
        return self.deviating == len(self.ties)

    @property
    def valid(self) -> bool:
        """Its speed has a meaning: the tokens are right, and it kept its pace."""
        return self.exact and self.representative

    @property
    def over_best(self) -> Ratio | None:
        """Against `best_baseline`."""
        return self.ratios.get(self.best_baseline or "")


Ties: TypeAlias = Mapping[tuple[Setting, str], float]
"""The gaps of generations that part from the reference at a near-tie, by setting and contender."""
NO_TIES: Ties = MappingProxyType({})


def rows(measurements: Sequence[Measurement], order: Sequence[str], ties: Ties = NO_TIES) -> list[BenchRow]:
    """A row for each temperature and contender, in the order of the contenders' names."""
    return _rows(measurements, measurements, order, ties)


def rows_by_category(
    measurements: Sequence[Measurement], order: Sequence[str], ties: Ties = NO_TIES
) -> dict[str, list[BenchRow]]:
    """The rows of each category's prompts; empty if the prompts have no categories.

    The baselines are those of all prompts: none is chosen by the prompts of one category.
    """
    categories = dict.fromkeys(one.setting.category for one in measurements if one.setting.category)
    return {
        category: _rows([one for one in measurements if one.setting.category == category], measurements, order, ties)
        for category in categories
    }


class Parts(NamedTuple):
    """What `adaptive` gains and by which of its parts: ratios of the median seconds of whole requests."""

    temperature: float
    category: str
    over_each: dict[str, float]
    """Our plain decoding over each contender."""
    draft: float | None
    """Prompt lookup alone over `adaptive`."""
    lookup: float | None
    """`adaptive` without prompt lookup over `adaptive`."""


def parts(rows: Sequence[BenchRow], by_category: Mapping[str, Sequence[BenchRow]]) -> Iterator[Parts]:
    """Of each category of prompts, and of all, at each temperature at which both `adaptive` and plain decoding ran."""
    for category, group in (*by_category.items(), ("all", rows)):
        for temperature in dict.fromkeys(row.temperature for row in group):
            here = (row for row in group if row.temperature == temperature and row.valid)
            seconds = {row.contender: found for row in here if (found := row.median("total_time"))}
            if (plain := seconds.get(PLAIN_OURS)) and (ours := seconds.get("adaptive")):
                over_each = {name: plain / each for name, each in seconds.items()}
                draft, lookup = (part and part / ours for part in map(seconds.get, (LOOKUP_ALONE, WITHOUT_LOOKUP)))
                yield Parts(temperature, category, over_each, draft, lookup)


def best_of_each_line(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Of the valid rows that differ only in K, the fastest at each temperature; and all rows that are not valid."""
    fastest: dict[tuple[float, str, bool], BenchRow] = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_second):
        if row.valid:
            fastest[row.temperature, *_line(row.contender)] = row
    chosen = list(map(id, fastest.values()))
    return [row for row in rows if not row.valid or id(row) in chosen]


def prompt_speeds(measurements: Iterable[Measurement]) -> list[float]:
    """Tokens/s of each prompt: the median over its repeats."""
    speeds = _conversation_speeds(measurements)
    return list(medians_by_prompt((prompt, speed) for (prompt, _), speed in speeds.items()).values())


def _conversation_speeds(measurements: Iterable[Measurement]) -> dict[tuple[int, int], float]:
    """By prompt and repeat: the tokens of all turns divided by the seconds of all turns. A mean of the turns' speeds
    would count a turn that copies an earlier one many times over."""
    sums: dict[tuple[int, int], tuple[int, float]] = {}
    for one in measurements:
        place, count = (one.setting.prompt, one.setting.repeat), len(one.generation.tokens)
        if count:
            tokens, seconds = sums.get(place, (0, 0.0))
            sums[place] = tokens + count, seconds + count / one.generation.tokens_per_second
    return {place: tokens / seconds for place, (tokens, seconds) in sums.items()}


def _rows(
    counted: Sequence[Measurement], measurements: Sequence[Measurement], order: Sequence[str], ties: Ties
) -> list[BenchRow]:
    """Rows of the `counted` ones among all `measurements`."""
    wrong = [deviation.wrong for deviation in deviating(counted, order)]
    result: list[BenchRow] = []
    for temperature in dict.fromkeys(measurement.setting.temperature for measurement in counted):
        here = [measurement for measurement in counted if measurement.setting.temperature == temperature]
        best, compared = _baselines([one for one in measurements if one.setting.temperature == temperature])
        for name in order:
            own = [measurement for measurement in here if measurement.contender == name]
            if own:
                differing = [(one.setting, one.contender) for one in own if one in wrong]
                result.append(
                    BenchRow(
                        measurements=own,
                        best_baseline=best,
                        ratios=_ratios(own, here, compared),
                        deviating=len(differing),
                        ties=tuple(ties[place] for place in differing if place in ties),
                    )
                )
    return result


def _baselines(measurements: Sequence[Measurement]) -> tuple[str | None, list[str]]:
    """By the measurements of all prompts at one temperature: mlx-lm's fastest contender, and those that the others are
    compared with."""
    lines: dict[tuple[str, bool], dict[str, list[Measurement]]] = {}
    for one in measurements:
        if one.family == "mlx-lm":
            lines.setdefault(_line(one.contender), {}).setdefault(one.contender, []).append(one)
    contenders = {name: own for names in lines.values() for name, own in names.items()}
    best = _fastest(contenders) if contenders else None
    return best, [*map(_fastest, lines.values()), PLAIN_OURS]


def _line(contender: str) -> tuple[str, bool]:
    """Its line, and whether it has a K. mlx-lm's plain and speculative decoding have one name and are two lines."""
    line, draft_tokens = line_and_draft_tokens(contender)
    return line, draft_tokens is not None


def _fastest(contenders: Mapping[str, Sequence[Measurement]]) -> str:
    """The contender with the highest median of tokens/s."""
    return max(contenders, key=lambda name: median(prompt_speeds(contenders[name])))


def _ratios(
    own: Sequence[Measurement], measurements: Sequence[Measurement], baselines: Iterable[str]
) -> dict[str, Ratio]:
    """A pair has one prompt and one repeat: a slow prompt or a slow minute slows both of a pair."""
    found: dict[str, Ratio] = {}
    ours = _conversation_speeds(own)
    for baseline in baselines:
        theirs = _conversation_speeds(one for one in measurements if one.contender == baseline)
        ratios = ((place[0], ours[place] / theirs[place]) for place in ours if place in theirs)
        ratio = paired_ratio(medians_by_prompt(ratios))
        if ratio is not None:
            found[baseline] = ratio
    return found
