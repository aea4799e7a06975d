"""The order of a bench's generations, their results, and which of them have wrong tokens. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

from orchestrator.lab.bench.contender import Family, TimedGeneration

C = TypeVar("C")
S = TypeVar("S")


class BenchRequest(NamedTuple):
    """One turn of a prompt: what every contender continues."""

    tokens: tuple[int, ...]
    prompt: int
    """Index of the prompt."""
    turn: int = 0
    """Index of the user's message in its conversation."""
    category: str = ""
    """Of the prompt; empty if it has none."""


class Setting(NamedTuple):
    """The conditions of one comparison: only generations of the same setting are compared."""

    repeat: int
    prompt: int
    """Index of the prompt."""
    temperature: float
    category: str = ""
    """Of the prompt; empty if it has none."""
    turn: int = 0
    """Index of the user's message in its conversation."""

    @property
    def seed(self) -> int:
        """The same for every contender, another one for every repeat and prompt."""
        return self.repeat * 1_000 + self.prompt


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation of one contender in one setting."""

    setting: Setting
    contender: str
    family: Family
    generation: TimedGeneration


def settings(
    repeats: int, requests: Sequence[BenchRequest], temperatures: Sequence[float]
) -> Iterator[tuple[Setting, tuple[int, ...]]]:
    """Every request at every temperature, `repeats` times over, with its tokens; the temperature changes fastest."""
    for repeat, each, temperature in product(range(repeats), requests, temperatures):
        yield Setting(repeat, each.prompt, temperature, each.category, each.turn), each.tokens


def schedule(contenders: Sequence[C], order: Iterable[S]) -> Iterator[tuple[S, C]]:
    """Each contender once in every setting, so that a machine that slows down slows all contenders alike.

    Each setting starts with the contender after the one that started the setting before.
    """
    for index, setting in enumerate(order):
        first = index % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            yield setting, contender


class Deviation(NamedTuple):
    """A measurement whose tokens differ from those of the reference."""

    wrong: Measurement
    reference: Measurement


def deviating(measurements: Iterable[Measurement], order: Sequence[str]) -> list[Deviation]:
    """The measurements whose tokens differ from the reference of their setting.

    At temperature 0 the reference is the first contender of `order` (names). Above it the reference is the first
    coupled contender, because all coupled contenders share their noise; the others draw tokens of their own.
    """
    by_setting: dict[Setting, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if is_checked(measurement):
            by_setting[measurement.setting].append(measurement)
    return [wrong for group in by_setting.values() for wrong in _differing(group, order)]


def is_checked(measurement: Measurement) -> bool:
    """Whether there is a reference for its tokens."""
    if measurement.family == "rival":
        return False
    return measurement.setting.temperature == 0 or measurement.family == "coupled"


def _differing(group: Sequence[Measurement], order: Sequence[str]) -> Iterator[Deviation]:
    reference = min(group, key=lambda measurement: order.index(measurement.contender))
    for measurement in group:
        if measurement.generation.tokens != reference.generation.tokens:
            yield Deviation(measurement, reference)
