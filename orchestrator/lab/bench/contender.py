"""What the bench compares: the task that every contender gets, its result, our pipelines as contenders, the names of
all, the order of the generations, and which of them have wrong tokens."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple, Protocol, TypeVar

from msgspec import structs

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from protocol.messages.client import Pace, Statistics

Family = Literal["mlx-lm", "ours", "rival"]
"""mlx-lm's own code; ours, with the target's own tokens; other software that computes with the weights in another way,
so that no token is compared."""


class GenerationTask(NamedTuple):
    """Continue these tokens."""

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def sampling(self, draft_tokens: int | None = None) -> SamplingParams:
        """The same parameters for a pipeline; `draft_tokens`: K, None for the pipeline's."""
        return SamplingParams(
            temperature=self.temperature,
            **UNFILTERED,
            seed=self.seed,
            max_tokens=self.max_tokens,
            draft_tokens=draft_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGeneration:
    """The result of one task. None: this contender has no such figure."""

    tokens: tuple[int, ...]
    tokens_per_second: float
    """Generated tokens, the first included, divided by the seconds until the last token. The clock starts when the
    target is free and has evaluated all of the prompt but its last token."""
    tokens_per_round: float
    """Generated tokens divided by forwards of the target."""
    acceptance_rate: float | None = None
    """Accepted tokens divided by draft tokens that the target verified."""
    arrivals: tuple[float, ...] = ()
    """Seconds from the request, prefill included, at which the client got each token. Empty: not recorded."""
    compares_prefill: bool = True
    """The prefill has the speed that is compared."""
    statistics: Statistics | None = None
    """Of a pipeline of ours."""
    pace: Pace | None = None
    """Of a paced contender."""

    @property
    def time_to_first_token(self) -> float | None:
        return self.arrivals[0] if self.arrivals and self.compares_prefill else None

    @property
    def total_time(self) -> float | None:
        """Seconds from the request to the last token."""
        return self.arrivals[-1] if self.arrivals and self.compares_prefill else None


class Contender(Protocol):
    """One way to decode: loaded, and idle between tasks."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Family: ...

    def generate(self, task: GenerationTask) -> TimedGeneration: ...


class PipelineContender:
    """A started pipeline of ours. It keeps its estimates from task to task, as in normal use."""

    family: Family = "ours"

    def __init__(self, name: str, pipeline: Pipeline, draft_tokens: int | None = None) -> None:
        """`draft_tokens`: K of its requests; None for the pipeline's. Contenders may share a pipeline."""
        self.name = name
        self._pipeline = pipeline
        self._draft_tokens = draft_tokens

    def generate(self, task: GenerationTask) -> TimedGeneration:
        began = time.perf_counter()
        arrivals: list[float] = []
        with self._pipeline.stream(task.tokens, task.sampling(self._draft_tokens)) as stream:
            for _ in stream:
                arrivals += [time.perf_counter() - began] * (stream.tokens - len(arrivals))
        result = stream.result
        assert result is not None
        # Tokens without text, such as the end token, give no piece of the stream.
        arrivals += [time.perf_counter() - began] * (len(result.tokens) - len(arrivals))
        figures = result.statistics
        return TimedGeneration(
            tokens=result.tokens,
            tokens_per_second=figures.tokens_per_second,
            tokens_per_round=figures.tokens_per_round,
            acceptance_rate=figures.acceptance_rate,
            arrivals=tuple(arrivals),
            statistics=figures,
            pace=figures.pace,
        )


class InDeviceTime:
    """A contender that ran in slow motion, with its figures in the time of the device.

    A second here is 1 / `factor` seconds there. The overhead of our rounds is this machine's own work and no part of
    the device's times, so that all of it counts: S' = S / factor + rounds x overhead x (1 - 1 / factor).
    """

    def __init__(self, contender: Contender, factor: float) -> None:
        self.name = contender.name
        self.family: Family = contender.family
        self._contender = contender
        self._factor = factor

    def generate(self, task: GenerationTask) -> TimedGeneration:
        slow = self._contender.generate(task)
        seconds = len(slow.tokens) / slow.tokens_per_second
        rounds = len(slow.tokens) / slow.tokens_per_round
        figures = slow.statistics
        hidden = rounds * (figures.overhead_per_round if figures else 0.0) * (1 - 1 / self._factor)
        # Seconds there for one here: what happens in between is spread evenly.
        scale = 1 / self._factor + hidden / seconds
        if figures is not None:
            busy = 1 / (self._factor * scale)
            figures = structs.replace(
                figures, target_busy=figures.target_busy * busy, draft_busy=figures.draft_busy * busy
            )
        return replace(
            slow,
            tokens_per_second=slow.tokens_per_second / scale,
            arrivals=tuple(arrival * scale for arrival in slow.arrivals),
            statistics=figures,
        )


# Names -----------------------------------------------------------------------------------------------

PLAIN = "mlx-lm"
"""mlx-lm on all cores: the baseline of the ratios. With a K it is mlx-lm's speculative decoding."""
ONE_DEVICE = "adaptive, one device"
"""`adaptive` whose draft computes on the target's device, in turns."""
CORE_ML_DRAFT = "adaptive, Core ML draft"
"""`adaptive` with the draft converted for Core ML."""
AUTOREGRESSIVE = "ar"
PLAIN_OURS = "plain (ar)"
WITHOUT_LOOKUP = "without lookup"
"""`adaptive` without prompt lookup."""
LOOKUP_ALONE = "lookup alone"
"""`adaptive` with the n-gram engine."""
BLIND_DRAFT = "blind draft"
"""`adaptive` with a draft that costs as much as the real one and guesses at random."""
LLAMA_CPP = "llama.cpp"
_NAME = re.compile(r"(?P<line>.*) K=(?P<draft_tokens>\d+)")


def contender_name(line: str, draft_tokens: int | None) -> str:
    """`sd K=2`; the line alone without a K."""
    return line if draft_tokens is None else f"{line} K={draft_tokens}"


def line_and_draft_tokens(contender: str) -> tuple[str, int | None]:
    """The inverse: the line, and K or None. Contenders of one line differ only in K."""
    found = _NAME.fullmatch(contender)
    return (contender, None) if found is None else (found["line"], int(found["draft_tokens"]))


# Measurements ----------------------------------------------------------------------------------------

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
    one of ours, because all of ours share their noise; the others draw tokens of their own.
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
    return measurement.setting.temperature == 0 or measurement.family == "ours"


def _differing(group: Sequence[Measurement], order: Sequence[str]) -> Iterator[Deviation]:
    reference = min(group, key=lambda measurement: order.index(measurement.contender))
    for measurement in group:
        if measurement.generation.tokens != reference.generation.tokens:
            yield Deviation(measurement, reference)
