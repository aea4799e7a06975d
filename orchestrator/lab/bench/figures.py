"""From measurements to the figures of the tables: medians, quartiles, ratios, categories. Pure arithmetic."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from orchestrator.core.request_stats import TOLERATED_OVERRUNS
from orchestrator.lab.bench.contender import TimedGeneration
from orchestrator.lab.bench.measurement import Measurement, Setting, deviating, is_checked
from orchestrator.lab.bench.names import AUTOREGRESSIVE, PLAIN, line_and_draft_tokens
from protocol.messages.client import Pace
from protocol.messages.worker import Paced

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


_FIGURES: dict[str, Callable[[TimedGeneration], float | None]] = {
    "tokens_per_round": lambda generation: generation.tokens_per_round,
    "hit_rate": lambda generation: generation.hit_rate,
    "acceptance_rate": lambda generation: generation.acceptance_rate,
    "target_busy": lambda generation: generation.target_busy,
    "draft_busy": lambda generation: generation.draft_busy,
    "overhead_per_round": lambda generation: generation.overhead_per_round,
    "time_to_first_token": lambda generation: generation.time_to_first_token,
    "total_time": lambda generation: generation.total_time,
    "stretch": lambda generation: generation.pace and generation.pace.stretch,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One contender at one temperature. None: no such figure.

    Speeds and ratios are medians over prompts of each prompt's median over turns and repeats; other figures are medians
    over prompts, turns and repeats.
    """

    contender: str
    draft_tokens: int | None
    """Its K, if that is fixed."""
    temperature: float
    generations: int
    tokens_per_second: float
    quartiles: Interval
    """Of tokens/s, over prompts."""
    slowest: float
    fastest: float
    best_baseline: str | None
    """mlx-lm's fastest contender on all cores at this temperature over all prompts, plain or speculative."""
    over_plain: float | None
    """Tokens/s divided by those of mlx-lm's plain decoding on all cores in the same setting."""
    over_speculative: float | None
    """The same against mlx-lm's speculative decoding on all cores with the number of draft tokens whose median is
    highest at this temperature over all prompts."""
    over_autoregressive: float | None
    """The same against our own `ar`."""
    ratios: Mapping[str, Ratio]
    """The same, with intervals, against each of the compared baselines, by their names."""
    tokens_per_round: float | None
    hit_rate: float | None
    acceptance_rate: float | None
    target_busy: float | None
    draft_busy: float | None
    overhead_per_round: float | None
    """Seconds."""
    time_to_first_token: float | None
    """Seconds from the request to the first token at the client, prefill included."""
    total_time: float | None
    """The same to the last token."""
    inter_token_p50: float | None
    """Seconds between successive arrivals at the client, over all generations. Tokens of a round arrive at once."""
    inter_token_p95: float | None
    checked: int
    """Generations whose tokens were compared with a reference."""
    deviating: int
    """Those that differed from it."""
    ties: tuple[float, ...]
    """Of these, the gaps of those that part from it at a near-tie, which rounding decides: in standard deviations of
    the logits. If any other differs, the other figures mean nothing."""
    rival: bool
    """Other software, whose tokens are not compared."""
    overruns: float | None
    """Share of the paced forwards that took longer than on the profile's device."""
    stretch: float | None
    """Share by which all paced forwards of a generation took longer, late wake-ups included; median."""

    @property
    def representative(self) -> bool:
        """The contender kept its pace, if it has one."""
        return self.overruns is None or self.overruns <= TOLERATED_OVERRUNS

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


def best_of_each_line(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Of the valid rows that differ only in K, the fastest at each temperature; and all rows that are not valid."""
    fastest: dict[tuple[float, str, bool], BenchRow] = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_second):
        if row.valid:
            fastest[row.temperature, *_line(row.contender)] = row
    chosen = list(map(id, fastest.values()))
    return [row for row in rows if not row.valid or id(row) in chosen]


def best_speculative(measurements: Iterable[Measurement]) -> str | None:
    """The name of mlx-lm's speculative contender, on all cores, with the highest median of tokens/s; None if there is
    none."""
    return _fastest(one for one in measurements if _line(one.contender) == (PLAIN, True))


def kept_pace(paces: Iterable[Pace | Paced | None]) -> bool:
    """Whether at most 1% of the forwards overran the profile's device. None: not paced."""
    known = [pace for pace in paces if pace is not None]
    return sum(pace.overruns for pace in known) <= TOLERATED_OVERRUNS * sum(pace.forwards for pace in known)


class _Baselines(NamedTuple):
    """Names of contenders at one temperature. None: there is no such contender."""

    best: str | None
    speculative: str | None
    fastest: tuple[str, ...]
    """Of each of mlx-lm's lines."""

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> "_Baselines":
        """By the measurements of all prompts at that temperature."""
        lines: dict[tuple[str, bool], list[Measurement]] = {}
        for measurement in measurements:
            if measurement.family == "mlx-lm":
                lines.setdefault(_line(measurement.contender), []).append(measurement)
        best = _fastest(one for one in measurements if _line(one.contender)[0] == PLAIN)
        return cls(best, best_speculative(measurements), tuple(filter(None, map(_fastest, lines.values()))))


def _rows(
    counted: Sequence[Measurement], measurements: Sequence[Measurement], order: Sequence[str], ties: Ties
) -> list[BenchRow]:
    """Rows of the `counted` ones among all `measurements`."""
    wrong = [deviation.wrong for deviation in deviating(counted, order)]
    result: list[BenchRow] = []
    for temperature in dict.fromkeys(measurement.setting.temperature for measurement in counted):
        baselines = _Baselines.of([one for one in measurements if one.setting.temperature == temperature])
        here = [measurement for measurement in counted if measurement.setting.temperature == temperature]
        for name in order:
            own = [measurement for measurement in here if measurement.contender == name]
            if own:
                deviations = [one for one in own if one in wrong]
                result.append(_row(own, here, baselines, deviations, ties))
    return result


def _row(
    own: Sequence[Measurement],
    measurements: Sequence[Measurement],
    baselines: _Baselines,
    wrong: Sequence[Measurement],
    ties: Ties,
) -> BenchRow:
    """`own` measurements of a contender among all `measurements` of the same prompts, `wrong` of them deviating."""
    generations = [measurement.generation for measurement in own]
    speeds = medians_by_prompt((one.setting.prompt, one.generation.tokens_per_second) for one in own).values()
    pauses = [gap for generation in generations for gap in gaps(generation.arrivals)]
    ratios = _ratios(own, measurements, (*baselines.fastest, AUTOREGRESSIVE))
    return BenchRow(
        contender=own[0].contender,
        draft_tokens=line_and_draft_tokens(own[0].contender)[1],
        temperature=own[0].setting.temperature,
        generations=len(own),
        tokens_per_second=median(speeds),
        quartiles=quartiles(speeds),
        slowest=min(generation.tokens_per_second for generation in generations),
        fastest=max(generation.tokens_per_second for generation in generations),
        best_baseline=baselines.best,
        over_plain=_median_of(ratios, PLAIN),
        over_speculative=_median_of(ratios, baselines.speculative),
        over_autoregressive=_median_of(ratios, AUTOREGRESSIVE),
        ratios=ratios,
        inter_token_p50=percentile(pauses, 0.5),
        inter_token_p95=percentile(pauses, 0.95),
        checked=sum(map(is_checked, own)),
        deviating=len(wrong),
        ties=tuple(ties[place] for one in wrong if (place := (one.setting, one.contender)) in ties),
        rival=own[0].family == "rival",
        overruns=_overruns(generations),
        **{figure: _median(map(read, generations)) for figure, read in _FIGURES.items()},
    )


def _line(contender: str) -> tuple[str, bool]:
    """Its line, and whether it has a K. mlx-lm's plain and speculative decoding have one name and are two lines."""
    line, draft_tokens = line_and_draft_tokens(contender)
    return line, draft_tokens is not None


def _fastest(measurements: Iterable[Measurement]) -> str | None:
    """The contender with the highest median of tokens/s."""
    speeds: dict[str, list[tuple[int, float]]] = {}
    for measurement in measurements:
        speed = measurement.setting.prompt, measurement.generation.tokens_per_second
        speeds.setdefault(measurement.contender, []).append(speed)
    return max(speeds, key=lambda name: median(medians_by_prompt(speeds[name]).values()), default=None)


def _ratios(
    own: Sequence[Measurement], measurements: Sequence[Measurement], baselines: Iterable[str]
) -> dict[str, Ratio]:
    """A pair has one setting: a slow prompt or a slow minute slows both of a pair."""
    found: dict[str, Ratio] = {}
    for baseline in baselines:
        speeds: dict[Setting, float] = {
            one.setting: one.generation.tokens_per_second for one in measurements if one.contender == baseline
        }
        pairs = [(one, speeds[one.setting]) for one in own if one.setting in speeds]
        ratios = ((one.setting.prompt, one.generation.tokens_per_second / speed) for one, speed in pairs)
        ratio = paired_ratio(medians_by_prompt(ratios))
        if ratio is not None:
            found[baseline] = ratio
    return found


def _median_of(ratios: Mapping[str, Ratio], baseline: str | None) -> float | None:
    ratio = ratios.get(baseline or "")
    return ratio.median if ratio else None


def _overruns(generations: Iterable[TimedGeneration]) -> float | None:
    paces = [generation.pace for generation in generations if generation.pace is not None]
    forwards = sum(pace.forwards for pace in paces)
    return sum(pace.overruns for pace in paces) / forwards if forwards else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
