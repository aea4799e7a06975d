"""Contenders: when each token of a pipeline came to the client, and figures of slow motion in the device's time."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.lab.bench import contender
from orchestrator.lab.bench.contender import Family, GenerationTask, InDeviceTime, PipelineContender, TimedGeneration
from tests.support.bench_measurements import statistics


class _Stream:
    """Pieces of given numbers of tokens; the last tokens, `silent`, have no text. A piece takes a second of `clock`."""

    def __init__(self, clock: list[float], pieces: tuple[int, ...], silent: int) -> None:
        self.tokens = 0
        self.result: Any = None
        self._clock, self._pieces, self._silent = clock, pieces, silent

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[str]:
        for count in self._pieces:
            self._clock[0] += 1.0
            self.tokens += count
            yield "text"
        self._clock[0] += 1.0
        self.result = SimpleNamespace(tokens=(0,) * (self.tokens + self._silent), statistics=statistics())


@pytest.mark.parametrize(
    ("pieces", "silent", "arrivals"),
    [((1, 3, 2), 0, (1.0, 2.0, 2.0, 2.0, 3.0, 3.0)), ((2,), 1, (1.0, 1.0, 2.0))],
    ids=["with their piece", "with the end if they have no text"],
)
def test_tokens_arrive(monkeypatch: pytest.MonkeyPatch, pieces: tuple, silent: int, arrivals: tuple):
    clock = [100.0]
    monkeypatch.setattr(contender.time, "perf_counter", lambda: clock[0])
    pipeline: Any = SimpleNamespace(stream=lambda *_: _Stream(clock, pieces, silent))
    generation = PipelineContender("ar", pipeline).generate(GenerationTask((1,), 9, 0.0, 0))

    assert generation.arrivals == arrivals
    assert len(arrivals) == len(generation.tokens)
    assert (generation.time_to_first_token, generation.total_time) == (1.0, arrivals[-1])


@pytest.mark.parametrize(("factor", "overhead"), [(2.0, 0.0), (2.0, 0.002), (5.0, 0.002)])
def test_slow_motion_gives_the_figures_of_the_device(factor: float, overhead: float):
    """20 rounds of 3 tokens, whose forwards take 25 ms on the device."""
    rounds, forward = 20, 0.025
    slow, there = (rounds * (scale * forward + overhead) for scale in (factor, 1.0))

    class Slow:
        name = "adaptive"
        family: Family = "ours"

        def generate(self, task: GenerationTask) -> TimedGeneration:
            return TimedGeneration(
                tokens=tuple(range(3 * rounds)),
                tokens_per_second=3 * rounds / slow,
                tokens_per_round=3.0,
                arrivals=(slow / 2, slow),
                statistics=statistics(target_busy=rounds * factor * forward / slow, overhead_per_round=overhead),
            )

    generation = InDeviceTime(Slow(), factor).generate(GenerationTask((1,), 60, 0.0, 0))

    assert generation.tokens_per_second == pytest.approx(3 * rounds / there)
    assert generation.arrivals == pytest.approx((there / 2, there))
    assert generation.statistics is not None
    assert generation.statistics.target_busy == pytest.approx(rounds * forward / there)
    assert generation.statistics.overhead_per_round == overhead
