"""Several requests at once: tokens/s of all together, and the wait of a request that joins the others.

mlx-lm batches plain decoding only: with a draft it serves one request after the other, at the rate that `strategies`
measures.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from orchestrator.api.pipeline import Pipeline
from orchestrator.core.options import StrategyName
from orchestrator.lab.bench.contender import GenerationTask, PipelineContender, TimedGeneration
from orchestrator.lab.bench.figures import kept_pace
from orchestrator.lab.bench.mlx_lm import BatchJob, running
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.trials import encoded
from orchestrator.lab.findings import Field, Findings, Listener, tabulated
from orchestrator.lab.report import machine_lines
from orchestrator.machine.check import Check
from orchestrator.machine.profiles.device_profiles import load_profile
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError

_PIECES_BEFORE_JOIN = 3
"""Pieces of text that every other request has received when the last request joins."""
_MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyRun:
    """One contender with a number of requests at once."""

    contender: str
    requests: int
    tokens_per_second: float
    """Of all requests together, while all of them are decoded; over all repeats."""
    round_seconds: float | None = None
    """Length of a round of the request that joins the others; median."""
    joining_seconds: float | None = None
    """From the submission of the request that joins, just after a round began, to its first token, without the target's
    prefill of its prompt; median."""
    exact: bool | None = None
    """Whether every token equals that of the request alone; None for mlx-lm, which samples with noise of its own."""
    representative: bool = True
    """It kept its pace, if it has one."""


class Served(NamedTuple):
    """One request among others."""

    submitted: float
    """Seconds on any clock."""
    generation: TimedGeneration

    @property
    def arrivals(self) -> list[float]:
        """Of each token, by the same clock."""
        return [self.submitted + after for after in self.generation.arrivals]


class Throughput(NamedTuple):
    """Tokens that came within a time."""

    tokens: int
    seconds: float


def throughput(served: Sequence[Served]) -> Throughput:
    """Of the time in which all requests are decoded: from the last first token to the first last token."""
    arrivals = [one.arrivals for one in served]
    begin, end = max(each[0] for each in arrivals), min(each[-1] for each in arrivals)
    if end <= begin:
        # The texts are too short for that: take the whole time, prefill included.
        begin, end = min(one.submitted for one in served), max(each[-1] for each in arrivals)
    return Throughput(sum(begin < at <= end for each in arrivals for at in each), max(1e-9, end - begin))


def rate(parts: Iterable[Throughput]) -> float:
    """Tokens a second over all parts."""
    tokens, seconds = (sum(column) for column in zip(*parts, strict=True))
    return tokens / seconds


def groups(tasks: Sequence[GenerationTask], count: int) -> list[list[GenerationTask]]:
    """Groups of `count` tasks that together hold every task, so that every number of requests has the same texts."""
    return [[tasks[(begin + index) % len(tasks)] for index in range(count)] for begin in range(0, len(tasks), count)]


def parse_requests(text: str) -> tuple[int, ...]:
    """Numbers of requests, ascending. Raises InputError for anything else."""
    numbers = text.split(",")
    counts = sorted(set(map(int, numbers))) if all(map(str.isdecimal, numbers)) else [0]
    if not 1 <= counts[0] <= counts[-1] <= _MAX_REQUESTS:
        raise InputError(f"Requests at once are numbers from 1 to {_MAX_REQUESTS}, for instance 1,2,4,8; not {text!r}.")
    return tuple(counts)


def measure(
    plan: BenchPlan,
    prompts: Sequence[BenchPrompt],
    watch: Listener,
    requests: Sequence[int],
) -> Findings:
    """Every contender with each number of requests."""
    watch.begin((1 + len(plan.strategies)) * len(requests), "mlx-lm")
    models, tokens = plan.models(), encoded(prompts, plan)
    tasks = [
        GenerationTask(tokens[index % len(tokens)], plan.max_tokens, plan.temperatures[0], index)
        for index in range(max(requests))
    ]
    runs = list(_of_mlx_lm(plan, requests, tasks, watch))
    references: dict[GenerationTask, tuple[int, ...]] = {}
    for strategy in plan.strategies:
        watch.starting(strategy)
        # Without arenas, so that a repeat finds no KV of its prompt.
        with Pipeline(settings=models.settings(strategy), pace=plan.pace, arena_memory=0) as pipeline:
            # This also gives every pipeline the same history of estimates before it is measured.
            alone = {task: pipeline.generate(task.tokens, task.sampling()).tokens for task in tasks}
            references = references or alone
            runs += _of_pipeline(strategy, pipeline, plan, requests, references, watch)
    return findings(runs, plan)


def findings(runs: Sequence[ConcurrencyRun], plan: BenchPlan) -> Findings:
    """A row a contender and number of requests."""
    single = {run.contender: run.tokens_per_second for run in runs if run.requests == 1}
    exact = {True: "exact", False: "WRONG", None: ""}
    fields: tuple[Field[ConcurrencyRun], ...] = (
        Field("contender", lambda run: run.contender, always=True),
        Field("requests", lambda run: run.requests, always=True),
        Field(
            "tok/s",
            lambda run: run.tokens_per_second,
            ".1f",
            "of all requests together, while all of them are decoded; every number of requests has the same prompts",
        ),
        Field(
            "x",
            lambda run: run.tokens_per_second / single[run.contender] if run.contender in single else "",
            ".2f",
            "relative to one request",
            always=True,
        ),
        Field(
            "joins after, ms",
            lambda run: run.joining_seconds,
            ".0f",
            "from a request's submission, just after a round of the others began, to its first token, without the "
            "target's prefill of its prompt; median",
            scale=1e3,
            always=True,
        ),
        Field(
            "round, ms", lambda run: run.round_seconds, ".0f", "length of its rounds; median", scale=1e3, always=True
        ),
        Field("tokens", lambda run: exact[run.exact], always=True),
    )
    pace = f" Paced as {plan.pace}; INVALID: did not keep the pace." if plan.pace else ""
    scope = f"{plan.max_tokens} tokens at temperature {plan.temperatures[0]:g}, {plan.repeats} repeats.{pace}"
    return Findings(
        title="several requests at once",
        conditions=(scope, *machine_lines()),
        tables=(tabulated("", fields, runs, lambda run: "" if run.representative else "INVALID"),),
        checks=tuple(
            Check(f"{run.contender} with {run.requests} requests at once", "fail", "other tokens than each alone")
            for run in runs
            if run.exact is False
        ),
        notes=("mlx-lm batches without a draft; with one it serves one request after the other.",),
        figures={"machine": machine_lines(), "settings": asdict(plan), "results": runs},
    )


def _of_pipeline(
    strategy: StrategyName,
    pipeline: Pipeline,
    plan: BenchPlan,
    requests: Sequence[int],
    references: Mapping[GenerationTask, tuple[int, ...]],
    watch: Listener,
) -> Iterator[ConcurrencyRun]:
    """`references`: every task with its tokens when it is served alone."""
    for count in requests:
        batches = groups(list(references), count) * plan.repeats
        served = [_serve(pipeline, batch) for batch in batches]
        watch.finished(f"{strategy}, {count} at once")
        generations = [one.generation for one in chain.from_iterable(served)]
        expected = [references[task] for task in chain.from_iterable(batches)]
        joining = [(generation, figures) for *_, (_, generation) in served if (figures := generation.statistics)]
        yield ConcurrencyRun(
            contender=strategy,
            requests=count,
            tokens_per_second=rate(map(throughput, served)),
            round_seconds=median(
                (one.arrivals[-1] - one.arrivals[0]) / max(1, figures.rounds - 1) for one, figures in joining
            ),
            joining_seconds=median(one.arrivals[0] - figures.prefill_seconds for one, figures in joining),
            exact=all(one.tokens == tokens for one, tokens in zip(generations, expected, strict=True)),
            representative=kept_pace(one.pace for one in generations),
        )


def _serve(pipeline: Pipeline, tasks: Sequence[GenerationTask]) -> list[Served]:
    """All tasks at once; the last one is submitted when the others are being decoded."""
    contender, begun = PipelineContender("", pipeline), [0] * len(tasks)

    def one(index: int) -> Served:
        def heard() -> None:
            begun[index] += 1

        return Served(time.perf_counter(), contender.generate(tasks[index], heard))

    with ThreadPoolExecutor(len(tasks)) as threads:
        others = [threads.submit(one, index) for index in range(len(tasks) - 1)]
        while any(
            count < _PIECES_BEFORE_JOIN and not other.done() for count, other in zip(begun, others, strict=False)
        ):
            time.sleep(0.002)
        last = threads.submit(one, len(tasks) - 1)
        return [future.result() for future in (*others, last)]


def _of_mlx_lm(
    plan: BenchPlan, requests: Sequence[int], tasks: Sequence[GenerationTask], watch: Listener
) -> Iterator[ConcurrencyRun]:
    """mlx-lm's own batch generator, without a draft."""
    target = plan.models().target
    common: dict[str, Any] = {
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperatures[0],
        "ends": tuple(sorted(TextCodec(target).eos)),
    }
    with running(str(target), "", None if plan.pace is None else load_profile(plan.pace)) as process:
        process.await_ready()
        for count in requests:
            prompts = [tuple(task.tokens for task in batch) for batch in groups(tasks, count)]
            jobs = [BatchJob(prompts=each, seed=0, **common) for each in prompts]
            results = [process.run_batch(job) for job in jobs * plan.repeats]
            yield ConcurrencyRun(
                contender="mlx-lm, batched",
                requests=count,
                tokens_per_second=rate(Throughput(each.generated, each.seconds) for each in results),
                representative=kept_pace(each.paced for each in results),
            )
            watch.finished(f"mlx-lm, {count} at once")
