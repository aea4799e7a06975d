"""One generation with where it belongs, and whether its tokens are the ones they must be. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.tools.bench.contender import Family, TimedGeneration
from orchestrator.tools.bench.schedule import Setting


@dataclass(frozen=True, slots=True)
class Measurement:
    """Who, under what, with what result."""

    setting: Setting
    contender: str
    family: Family
    generation: TimedGeneration


def deviating(measurements: Iterable[Measurement], order: Sequence[str]) -> list[Measurement]:
    """Those whose tokens differ from the reference of their setting.

    At temperature 0 everybody must agree with the first of `order` (names of contenders). At a higher one
    our contenders share their noise and must agree with the first of ours; mlx-lm and rejection sampling draw
    their own tokens.
    """
    by_setting: dict[Setting, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if is_checked(measurement):
            by_setting[measurement.setting].append(measurement)
    return [wrong for group in by_setting.values() for wrong in _differing(group, order)]


def is_checked(measurement: Measurement) -> bool:
    """Whether its tokens can be compared with anybody's."""
    return measurement.setting.temperature == 0 or measurement.family == "ours"


def _differing(group: Sequence[Measurement], order: Sequence[str]) -> Iterator[Measurement]:
    reference = min(group, key=lambda measurement: order.index(measurement.contender))
    for measurement in group:
        if measurement.generation.tokens != reference.generation.tokens:
            yield measurement
