"""From measurements to the figures of the table: medians, extremes and ratios. Pure arithmetic."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.core.request_stats import TOLERATED_OVERRUNS
from orchestrator.tools.bench.contender import TimedGeneration
from orchestrator.tools.bench.measurement import Measurement, Setting, deviating, is_checked
from orchestrator.tools.bench.names import AUTOREGRESSIVE, PLAIN, line_and_draft_tokens
from protocol.messages.client import Pace
from protocol.messages.worker import Paced

_FIGURES: dict[str, Callable[[TimedGeneration], float | None]] = {
    "tokens_per_round": lambda generation: generation.tokens_per_round,
    "hit_rate": lambda generation: generation.hit_rate,
    "acceptance_rate": lambda generation: generation.acceptance_rate,
    "target_busy": lambda generation: generation.target_busy,
    "draft_busy": lambda generation: generation.draft_busy,
    "overhead_per_round": lambda generation: generation.overhead_per_round,
    "stretch": lambda generation: generation.pace and generation.pace.stretch,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One contender at one temperature. Figures are medians over prompts and repeats. None: no such figure."""

    contender: str
    temperature: float
    generations: int
    tokens_per_second: float
    slowest: float
    fastest: float
    over_plain: float | None
    """Tokens/s divided by those of mlx-lm's plain decoding in the same setting, median over settings."""
    over_speculative: float | None
    """The same against mlx-lm's speculative decoding, with the number of draft tokens whose median is highest at this
    temperature."""
    over_autoregressive: float | None
    """The same against our own `ar`."""
    tokens_per_round: float | None
    hit_rate: float | None
    acceptance_rate: float | None
    target_busy: float | None
    draft_busy: float | None
    overhead_per_round: float | None
    """Seconds."""
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


def rows(measurements: Sequence[Measurement], order: Sequence[str]) -> list[BenchRow]:
    """A row for each temperature and contender, in the order of the contenders' names."""
    wrong = deviating(measurements, order)
    result: list[BenchRow] = []
    for temperature in dict.fromkeys(measurement.setting.temperature for measurement in measurements):
        here = [measurement for measurement in measurements if measurement.setting.temperature == temperature]
        result += _rows_at(temperature, here, order, wrong)
    return result


def best_speculative(measurements: Iterable[Measurement]) -> str | None:
    """The name of mlx-lm's speculative contender, on all cores, with the highest median of tokens/s; None if there is
    none."""
    speeds: dict[str, list[float]] = {}
    for measurement in measurements:
        line, draft_tokens = line_and_draft_tokens(measurement.contender)
        if line == PLAIN and draft_tokens is not None:
            speeds.setdefault(measurement.contender, []).append(measurement.generation.tokens_per_second)
    return max(speeds, key=lambda name: median(speeds[name]), default=None)


def kept_pace(paces: Iterable[Pace | Paced | None]) -> bool:
    """Whether at most 1% of the forwards overran the profile's device. None: not paced."""
    known = [pace for pace in paces if pace is not None]
    return sum(pace.overruns for pace in known) <= TOLERATED_OVERRUNS * sum(pace.forwards for pace in known)


def _rows_at(
    temperature: float, measurements: Sequence[Measurement], order: Sequence[str], wrong: Sequence[Measurement]
) -> Iterable[BenchRow]:
    baselines = (PLAIN, best_speculative(measurements), AUTOREGRESSIVE)
    for name in order:
        own = [measurement for measurement in measurements if measurement.contender == name]
        if not own:
            continue
        speeds = [measurement.generation.tokens_per_second for measurement in own]
        plain, speculative, autoregressive = (_ratio(own, measurements, name) for name in baselines)
        yield BenchRow(
            contender=name,
            temperature=temperature,
            generations=len(own),
            tokens_per_second=median(speeds),
            slowest=min(speeds),
            fastest=max(speeds),
            over_plain=plain,
            over_speculative=speculative,
            over_autoregressive=autoregressive,
            checked=sum(map(is_checked, own)),
            deviating=sum(measurement in wrong for measurement in own),
            rejection=own[0].family == "rejection",
            overruns=_overruns(one.generation for one in own),
            **{figure: _median(map(read, (one.generation for one in own))) for figure, read in _FIGURES.items()},
        )


def _ratio(own: Sequence[Measurement], measurements: Iterable[Measurement], baseline: str | None) -> float | None:
    """Median over pairs of the same setting: a slow prompt or a slow minute slows both of a pair."""
    speeds: dict[Setting, float] = {
        measurement.setting: measurement.generation.tokens_per_second
        for measurement in measurements
        if measurement.contender == baseline
    }
    ratios = [one.generation.tokens_per_second / speeds[one.setting] for one in own if one.setting in speeds]
    return median(ratios) if ratios else None


def _overruns(generations: Iterable[TimedGeneration]) -> float | None:
    paces = [generation.pace for generation in generations if generation.pace is not None]
    forwards = sum(pace.forwards for pace in paces)
    return sum(pace.overruns for pace in paces) / forwards if forwards else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
