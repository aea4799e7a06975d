"""From measurements to the figures of the tables: medians, quartiles, ratios, categories. Pure arithmetic."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.core.request_stats import TOLERATED_OVERRUNS
from orchestrator.tools.bench.contender import TimedGeneration, draft_tokens_of, variants_of
from orchestrator.tools.bench.intervals import (
    Interval,
    Ratio,
    gaps,
    medians_by_prompt,
    paired_ratio,
    percentile,
    quartiles,
)
from orchestrator.tools.bench.measurement import Measurement, Setting, deviating, is_checked
from protocol.messages.client import Pace
from protocol.messages.worker import Paced

PLAIN = "mlx-lm"
"""Name of the plain baseline."""
AUTOREGRESSIVE = "ar"
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

    Speeds and ratios are medians over prompts of each prompt's median over repeats; other figures are medians over
    prompts and repeats.
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
    """mlx-lm's fastest contender at this temperature over all prompts, plain or speculative."""
    over_plain: float | None
    """Tokens/s divided by those of mlx-lm's fastest plain decoding in the same setting."""
    over_speculative: float | None
    """The same against mlx-lm's fastest speculative decoding, which is the one with the best number of draft tokens
    at this temperature over all prompts."""
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
    """Those that differed from it. If there are any, the other figures mean nothing."""
    rejection: bool
    """It verifies by rejection sampling: its tokens have the target's distribution and no reference."""
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
        return self.deviating == 0

    @property
    def valid(self) -> bool:
        """Its speed has a meaning: the tokens are right, and it kept its pace."""
        return self.exact and self.representative

    @property
    def over_best(self) -> Ratio | None:
        """Against `best_baseline`."""
        return self.ratios.get(self.best_baseline or "")


def rows(measurements: Sequence[Measurement], order: Sequence[str]) -> list[BenchRow]:
    """A row for each temperature and contender, in the order of the contenders' names."""
    return _rows(measurements, measurements, order)


def rows_by_category(
    measurements: Sequence[Measurement], order: Sequence[str], categories: Sequence[str]
) -> dict[str, list[BenchRow]]:
    """The rows of each category's prompts; `categories` has the category of each prompt.

    The baselines are those of all prompts: none is chosen by the prompts of one category.
    """
    return {
        category: _rows(
            [one for one in measurements if categories[one.setting.prompt] == category], measurements, order
        )
        for category in dict.fromkeys(categories)
    }


def best_of_each_family(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Of the valid rows of one temperature that differ only in K, the fastest; and all rows that are not valid."""
    fastest: dict[tuple[float, str], BenchRow] = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_second):
        if row.valid:
            fastest[row.temperature, variants_of(row.contender)] = row
    chosen = list(map(id, fastest.values()))
    return [row for row in rows if not row.valid or id(row) in chosen]


def best_plain(measurements: Iterable[Measurement]) -> str | None:
    """The name of mlx-lm's fastest contender without a draft; None if there is none."""
    return _fastest(one for one in measurements if one.family == "mlx-lm" and not draft_tokens_of(one.contender))


def best_speculative(measurements: Iterable[Measurement]) -> str | None:
    """The name of mlx-lm's speculative contender with the highest median of tokens/s; None if there is none."""
    return _fastest(one for one in measurements if one.family == "mlx-lm" and draft_tokens_of(one.contender))


def kept_pace(paces: Iterable[Pace | Paced | None]) -> bool:
    """Whether at most 1% of the forwards overran the profile's device. None: not paced."""
    known = [pace for pace in paces if pace is not None]
    return sum(pace.overruns for pace in known) <= TOLERATED_OVERRUNS * sum(pace.forwards for pace in known)


def _rows(counted: Sequence[Measurement], measurements: Sequence[Measurement], order: Sequence[str]) -> list[BenchRow]:
    """Rows of the `counted` ones among all `measurements`."""
    wrong = deviating(counted, order)
    result: list[BenchRow] = []
    for temperature in dict.fromkeys(measurement.setting.temperature for measurement in counted):
        everyone = [measurement for measurement in measurements if measurement.setting.temperature == temperature]
        here = [measurement for measurement in counted if measurement.setting.temperature == temperature]
        for name in order:
            own = [measurement for measurement in here if measurement.contender == name]
            if own:
                result.append(_row(own, here, everyone, [one for one in own if one in wrong]))
    return result


def _row(
    own: Sequence[Measurement],
    here: Sequence[Measurement],
    everyone: Sequence[Measurement],
    wrong: Sequence[Measurement],
) -> BenchRow:
    """`own` measurements of a contender, `here` those of all contenders, `everyone` the same for all prompts."""
    generations = [measurement.generation for measurement in own]
    speeds = medians_by_prompt((one.setting.prompt, one.generation.tokens_per_second) for one in own).values()
    pauses = [gap for generation in generations for gap in gaps(generation.arrivals)]
    plain, speculative = best_plain(everyone), best_speculative(everyone)
    ratios = _ratios(own, here, _baselines(everyone))
    return BenchRow(
        contender=own[0].contender,
        draft_tokens=draft_tokens_of(own[0].contender),
        temperature=own[0].setting.temperature,
        generations=len(own),
        tokens_per_second=median(speeds),
        quartiles=quartiles(speeds),
        slowest=min(generation.tokens_per_second for generation in generations),
        fastest=max(generation.tokens_per_second for generation in generations),
        best_baseline=_fastest(one for one in everyone if one.family == "mlx-lm"),
        over_plain=_median_of(ratios, plain),
        over_speculative=_median_of(ratios, speculative),
        over_autoregressive=_median_of(ratios, AUTOREGRESSIVE),
        ratios=ratios,
        inter_token_p50=percentile(pauses, 0.5),
        inter_token_p95=percentile(pauses, 0.95),
        checked=sum(map(is_checked, own)),
        deviating=len(wrong),
        rejection=own[0].family == "rejection",
        overruns=_overruns(generations),
        **{figure: _median(map(read, generations)) for figure, read in _FIGURES.items()},
    )


def _baselines(measurements: Sequence[Measurement]) -> list[str]:
    """The fastest of each family of mlx-lm's contenders, and our `ar`."""
    families = dict.fromkeys(variants_of(one.contender) for one in measurements if one.family == "mlx-lm")
    fastest = (_fastest(one for one in measurements if variants_of(one.contender) == family) for family in families)
    return [*filter(None, fastest), AUTOREGRESSIVE]


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
