"""Several requests at once: tokens a second of all together, and how long one that joins them waits. Prints nothing.

mlx-lm batches plain decoding alone: with a draft it serves one request after the other.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from orchestrator.api.pipeline import Pipeline
from orchestrator.core.options import StrategyName
from orchestrator.core.request_stats import TOLERATED_OVERRUNS
from orchestrator.machine.device_profiles import load_profile
from orchestrator.text.tokenizer import TextCodec
from orchestrator.tools.bench.baseline.contender import MlxLm, running
from orchestrator.tools.bench.baseline.messages import BatchOrder, Order
from orchestrator.tools.bench.contender import GenerationTask
from orchestrator.tools.bench.trials import BenchPlan, encoded
from protocol.errors import InputError
from protocol.messages.client import Statistics
from protocol.messages.worker import Paced

_SETTLED = 3
"""Pieces that the others have got when the last request joins them."""
_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyRun:
    """One contender with so many requests at once."""

    contender: str
    requests: int
    tokens_per_second: float
    """Of all together, while all of them are decoded; over all repeats."""
    round_seconds: float | None = None
    """Of one that joins the others; median."""
    joining_seconds: float | None = None
    """From its submission, right behind the beginning of a round, to its first token, less what the target took to
    read its prompt; median."""
    exact: bool | None = None
    """Every token is that of the request alone; None where somebody else's sampling is used."""
    representative: bool = True
    """It kept to its pace, if it was given one."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """One request's pieces as they came: when (seconds on any clock), and how many tokens each had."""

    submitted: float
    pieces: tuple[tuple[float, int], ...]
    tokens: tuple[int, ...]
    statistics: Statistics

    @property
    def first(self) -> float:
        return self.pieces[0][0]

    @property
    def last(self) -> float:
        return self.pieces[-1][0]


class Flow(NamedTuple):
    """What came in a time."""

    tokens: int
    seconds: float


def flow(crowd: Sequence[Arrivals]) -> Flow:
    """From when the last of them has its first token to when the first of them has its last."""
    begin, end = max(one.first for one in crowd), min(one.last for one in crowd)
    if end <= begin:
        # Texts too short for that: all of it, prompts included.
        begin, end = min(one.submitted for one in crowd), max(one.last for one in crowd)
    return Flow(sum(count for one in crowd for at, count in one.pieces if begin < at <= end), max(1e-9, end - begin))


def rate(flows: Iterable[Flow]) -> float:
    """Tokens a second over all of them."""
    tokens, seconds = (sum(column) for column in zip(*flows, strict=True))
    return tokens / seconds


def groups(tasks: Sequence[GenerationTask], count: int) -> list[list[GenerationTask]]:
    """So many tasks at once until each has had its turn, so that every number of requests is about the same texts."""
    return [[tasks[(begin + index) % len(tasks)] for index in range(count)] for begin in range(0, len(tasks), count)]


def parse_requests(text: str) -> tuple[int, ...]:
    """Numbers of requests, rising. Raises InputError for anything else."""
    counts = tuple(sorted({int(each) for each in text.split(",") if each.isdigit()}))
    if not counts or not all(each.isdigit() for each in text.split(",")) or not 1 <= counts[0] <= counts[-1] <= _MOST:
        raise InputError(f"--requests takes numbers from 1 to {_MOST}, for instance 1,2,4,8; {text!r} is not that.")
    return counts


def measure(
    plan: BenchPlan,
    requests: Sequence[int],
    texts: Sequence[str],
    on_start: Callable[[str], None],
    on_crowd: Callable[[str], None],
) -> list[ConcurrencyRun]:
    """Every contender with each number of requests."""
    prompts = encoded(texts, plan)
    tasks = [
        GenerationTask(tuple(prompts[index % len(prompts)]), plan.max_tokens, plan.temperatures[0], index)
        for index in range(max(requests))
    ]
    crowds = list(_of_mlx_lm(plan, requests, tasks, on_start, on_crowd))
    truth: dict[GenerationTask, tuple[int, ...]] = {}
    for strategy in plan.strategies:
        on_start(strategy)
        # Repeats must not find the prompt's KV in memory.
        with Pipeline(*plan.folders(), strategy=strategy, pace=plan.pace, arena_memory=0) as pipeline:
            # Also what a pipeline has learned by when it is measured, which must be the same for all.
            alone = {task: pipeline.generate(task.tokens, task.sampling()).tokens for task in tasks}
            truth = truth or alone
            crowds += _of_pipeline(strategy, pipeline, plan, requests, truth, on_crowd)
    return crowds


def _of_pipeline(
    strategy: StrategyName,
    pipeline: Pipeline,
    plan: BenchPlan,
    requests: Sequence[int],
    truth: Mapping[GenerationTask, tuple[int, ...]],
    on_crowd: Callable[[str], None],
) -> Iterator[ConcurrencyRun]:
    """`truth`: every task, with the tokens that it has alone."""
    for count in requests:
        crowds = groups(list(truth), count) * plan.repeats
        served = [_serve(pipeline, crowd) for crowd in crowds]
        on_crowd(f"{strategy}, {count} at once")
        everything = list(chain.from_iterable(served))
        expected = [truth[task] for task in chain.from_iterable(crowds)]
        paces = [one.statistics.pace for one in everything if one.statistics.pace is not None]
        overruns, forwards = sum(pace.overruns for pace in paces), sum(pace.forwards for pace in paces)
        joining = [crowd[-1] for crowd in served]
        yield ConcurrencyRun(
            contender=strategy,
            requests=count,
            tokens_per_second=rate(map(flow, served)),
            round_seconds=median((one.last - one.first) / max(1, one.statistics.rounds - 1) for one in joining),
            joining_seconds=median(one.first - one.submitted - one.statistics.prefill_seconds for one in joining),
            exact=all(one.tokens == tokens for one, tokens in zip(everything, expected, strict=True)),
            representative=overruns <= TOLERATED_OVERRUNS * forwards,
        )


def _serve(pipeline: Pipeline, tasks: Sequence[GenerationTask]) -> list[Arrivals]:
    """All at once, but the last, which joins the others when they are being decoded."""
    begun = [0] * (len(tasks) - 1)

    def one(index: int) -> Arrivals:
        submitted, pieces = time.perf_counter(), []
        with pipeline.stream(tasks[index].tokens, tasks[index].sampling()) as stream:
            for _ in stream:
                pieces.append((time.perf_counter(), stream.tokens))
                if index < len(begun):
                    begun[index] += 1
            assert stream.result is not None
            return Arrivals(submitted, _differences(pieces), stream.result.tokens, stream.result.statistics)

    with ThreadPoolExecutor(len(tasks)) as threads:
        others = [threads.submit(one, index) for index in range(len(tasks) - 1)]
        while any(count < _SETTLED and not other.done() for count, other in zip(begun, others, strict=True)):
            time.sleep(0.002)
        last = threads.submit(one, len(tasks) - 1)
        return [future.result() for future in (*others, last)]


def _differences(counts: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    before = [0, *(count for _, count in counts)]
    return tuple((at, count - earlier) for (at, count), earlier in zip(counts, before, strict=False))


def _of_mlx_lm(
    plan: BenchPlan,
    requests: Sequence[int],
    tasks: Sequence[GenerationTask],
    on_start: Callable[[str], None],
    on_crowd: Callable[[str], None],
) -> Iterator[ConcurrencyRun]:
    target, draft = plan.folders()
    profile = None if plan.pace is None else load_profile(plan.pace)
    ends = tuple(sorted(TextCodec(Path(target)).eos))
    with ExitStack() as stack:
        on_start("mlx-lm")
        process = stack.enter_context(running(target, draft if plan.draft_tokens else "", profile))
        process.await_ready()
        for count in requests:
            yield _batched(process, plan, tasks, count, ends)
            on_crowd(f"mlx-lm, {count} at once")
        for draft_tokens in plan.draft_tokens:
            yield from _one_after_the_other(process, plan, draft_tokens, requests, tasks, ends)
            on_crowd(f"mlx-lm K={draft_tokens}")


def _batched(
    process: MlxLm, plan: BenchPlan, tasks: Sequence[GenerationTask], count: int, ends: tuple[int, ...]
) -> ConcurrencyRun:
    """mlx-lm's own batch generator, without a draft."""
    common: dict[str, Any] = {"max_tokens": plan.max_tokens, "temperature": plan.temperatures[0], "ends": ends}
    orders = [
        BatchOrder(prompts=tuple(task.tokens for task in crowd), seed=0, **common) for crowd in groups(tasks, count)
    ]
    deliveries = [process.carry_out_batch(order) for order in orders * plan.repeats]
    return ConcurrencyRun(
        contender="mlx-lm, batched",
        requests=count,
        tokens_per_second=rate(Flow(each.generated, each.seconds) for each in deliveries),
        representative=_kept([each.paced for each in deliveries]),
    )


def _one_after_the_other(
    process: MlxLm,
    plan: BenchPlan,
    draft_tokens: int,
    requests: Sequence[int],
    tasks: Sequence[GenerationTask],
    ends: tuple[int, ...],
) -> Iterator[ConcurrencyRun]:
    """With a draft each request has the models to itself, so that what all get is what one gets."""
    orders = [Order(ends=ends, draft_tokens=draft_tokens, **task._asdict()) for task in tasks]
    deliveries = [process.carry_out(order) for order in orders for _ in range(plan.repeats)]
    speed = rate(Flow(len(each.tokens), each.seconds) for each in deliveries)
    kept = _kept([each.paced for each in deliveries])
    for count in requests:
        yield ConcurrencyRun(
            contender=f"mlx-lm K={draft_tokens}", requests=count, tokens_per_second=speed, representative=kept
        )


def _kept(paces: Sequence[Paced | None]) -> bool:
    done = sum(filter(None, paces), Paced())
    return done.overruns <= TOLERATED_OVERRUNS * done.forwards
