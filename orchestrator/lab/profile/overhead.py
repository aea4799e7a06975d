"""The cost of tracing: a traced and an untraced pipeline generate the same tokens in turns."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import comb
from statistics import median
from typing import NamedTuple

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.profile.measure import WARM_UP_TOKENS, ProfileTask
from orchestrator.machine.drafts.draft_choice import first_engine
from protocol.contracts.engines import AUTO

PAIRS = 8
"""Generations of each pipeline before both are restarted."""


class TracingCost(NamedTuple):
    """Throughput with tracing divided by throughput without it: the median over groups of generations."""

    ratio: float
    low: float
    high: float
    """The median lies between these with at least 95% confidence."""
    groups: int


def tracing_cost(
    task: ProfileTask,
    groups: int,
    notice: Callable[[str], None],
    on_note: Callable[[str], None] = lambda _: None,
) -> TracingCost:
    """Starts both pipelines `groups` times and measures them in turns.

    Two equal pipelines may differ by some percent for their whole life (memory placement), so one start is not enough.
    `on_note` receives the pipelines' note once, if they have one.
    """
    # A traced pipeline tries no second engine, so the untraced one must not either.
    engine = first_engine(task.options.get("draft_engine", AUTO), task.options.get("draft"))
    options = {**task.options, "draft_engine": engine}
    ratios = []
    told: set[str] = {""}
    for group in range(groups):
        notice(f"group {group + 1} of {groups}")
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            pipelines = {}
            for trace in (folder, "") if group % 2 else ("", folder):
                pipeline = Pipeline(trace=trace, **options)
                if pipeline.note not in told:
                    told.add(pipeline.note)
                    on_note(pipeline.note)
                pipelines[trace] = stack.enter_context(pipeline)
                _speed(pipelines[trace], task, 0, WARM_UP_TOKENS)
            ratios.append(median(_ratio(pipelines[folder], pipelines[""], task, index) for index in range(PAIRS)))
    return cost(ratios)


def _ratio(traced: Pipeline, untraced: Pipeline, task: ProfileTask, index: int) -> float:
    order = (traced, untraced) if index % 2 else (untraced, traced)
    speeds = {pipeline: _speed(pipeline, task, index, task.max_tokens) for pipeline in order}
    return speeds[traced] / speeds[untraced]


def cost(ratios: Sequence[float]) -> TracingCost:
    """The median with its confidence interval by order statistics, which needs no assumption about the noise.

    Fewer than six ratios give no 95% interval; then it is the whole range.
    """
    ranked = sorted(ratios)
    count = len(ranked)
    outside = 0.0
    rank = 0
    # The chance that at most `rank` of `count` fair coins show heads, twice, is what the interval may miss.
    while (outside := outside + 2 * comb(count, rank) / 2**count) <= 0.05:
        rank += 1
    rank = max(0, rank - 1)
    return TracingCost(median(ranked), ranked[rank], ranked[count - 1 - rank], count)


def _speed(pipeline: Pipeline, task: ProfileTask, index: int, tokens: int) -> float:
    # Two pairs at each temperature before the next, so that either pipeline goes first at each.
    temperature = task.temperatures[index // 2 % len(task.temperatures)]
    return pipeline.generate(task.prompt, task.sampling(temperature, tokens)).statistics.tokens_per_second
