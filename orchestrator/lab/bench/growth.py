"""Speed and overhead by the length of the prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from orchestrator.core.options import StrategyName
from orchestrator.lab.bench.figures import kept_pace
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.trials import joined_tokens
from orchestrator.lab.findings import Field, Findings, Line, Listener, Panel, tabulated
from orchestrator.lab.report import machine_lines
from protocol.errors import InputError
from protocol.messages.client import Statistics

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Prompt tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengthFigures:
    """One strategy with prompts of one length; medians over repeats."""

    strategy: str
    prompt_tokens: int
    tokens_per_second: float
    tokens_per_round: float
    overhead_per_round: float
    """Seconds of a round without verification, deliberate waiting for the draft included; mean."""
    representative: bool
    """It kept its pace, if it has one."""


def lengths(context: int, max_tokens: int) -> list[int]:
    """The lengths that fit the context. Raises InputError if none does."""
    fitting = [length for length in LENGTHS if length + max_tokens <= context]
    if not fitting:
        raise InputError(
            f"The target's context of {context:,} has no room for {LENGTHS[0]} tokens and {max_tokens:,} more: "
            "lower --max-tokens."
        )
    return fitting


def left_out(context: int, max_tokens: int) -> str:
    """A sentence about the lengths that do not fit the context; empty if all fit."""
    missing = [f"{length:,}" for length in LENGTHS if length + max_tokens > context]
    return f"The target's context of {context:,} has no room for prompts of {', '.join(missing)}." if missing else ""


def measure(plan: BenchPlan, prompts: Sequence[BenchPrompt], watch: Listener) -> Findings:
    """Every strategy of the plan with every length, one pipeline after the other."""
    tokens = joined_tokens(prompts, plan)
    results: list[PromptLengthFigures] = []
    context = 0
    models = plan.models()
    watch.begin(len(plan.strategies) * len(LENGTHS), "the pipelines")
    for strategy in plan.strategies:
        with Pipeline(settings=models.settings(strategy), pace=plan.pace, arena_memory=0) as pipeline:
            context = pipeline.state().context
            fitting = lengths(context, plan.max_tokens)
            watch.total(len(plan.strategies) * len(fitting))
            results += _with_all_lengths(strategy, pipeline, plan, tokens, fitting, watch)
    return findings(results, plan, context)


_SCOPE = "{} tokens at temperature {:g}, {} repeats. Medians over repeats."
_FIELDS: tuple[Field[PromptLengthFigures], ...] = (
    Field("strategy", lambda row: row.strategy, always=True),
    Field("prompt", lambda row: row.prompt_tokens, ",d", always=True),
    Field("tok/s", lambda row: row.tokens_per_second, ".1f"),
    Field("tok/round", lambda row: row.tokens_per_round, ".2f", always=True),
    Field(
        "µs",
        lambda row: row.overhead_per_round,
        ".0f",
        "time of a round without verification, deliberate waiting for the draft included",
        scale=1e6,
        always=True,
    ),
)


def findings(rows: Sequence[PromptLengthFigures], plan: BenchPlan, context: int) -> Findings:
    """A row a strategy and length, and a picture of both."""
    return Findings(
        title=f"{plan.pace or 'this machine'}, by the length of the prompt",
        conditions=(
            _SCOPE.format(plan.max_tokens, plan.temperatures[0], plan.repeats),
            *([f"Paced as {plan.pace}."] if plan.pace else []),
            *filter(None, [left_out(context, plan.max_tokens)]),
            *machine_lines(),
        ),
        tables=(tabulated("", _FIELDS, rows, lambda row: "" if row.representative else "INVALID"),),
        panels=(
            (
                _panel("tokens/s", rows, lambda row: row.tokens_per_second),
                _panel("µs a round without verification", rows, lambda row: 1e6 * row.overhead_per_round),
            ),
        ),
        figures={
            "machine": machine_lines(),
            "settings": asdict(plan),
            "context": context,
            "left_out": [length for length in LENGTHS if length + plan.max_tokens > context],
            "results": rows,
        },
    )


def _panel(title: str, rows: Sequence[PromptLengthFigures], read: Callable[[PromptLengthFigures], float]) -> Panel:
    lines = (
        Line(name, tuple((row.prompt_tokens, read(row)) for row in rows if row.strategy == name))
        for name in dict.fromkeys(row.strategy for row in rows)
    )
    ticks = sorted({float(row.prompt_tokens) for row in rows})
    return Panel(title=title, x="prompt tokens", lines=tuple(lines), ticks=tuple(ticks), logarithm=2)


def summary(strategy: str, prompt_tokens: int, repeats: Sequence[Statistics]) -> PromptLengthFigures:
    """The figures of one length."""
    return PromptLengthFigures(
        strategy=strategy,
        prompt_tokens=prompt_tokens,
        tokens_per_second=median(one.tokens_per_second for one in repeats),
        tokens_per_round=median(one.tokens_per_round for one in repeats),
        overhead_per_round=median(map(overhead, repeats)),
        representative=kept_pace(one.pace for one in repeats),
    )


def overhead(statistics: Statistics) -> float:
    """Seconds of a round without verification; mean."""
    seconds = statistics.generated_tokens / statistics.tokens_per_second
    return (1.0 - statistics.target_busy) * seconds / statistics.rounds


def _with_all_lengths(
    strategy: StrategyName,
    pipeline: Pipeline,
    plan: BenchPlan,
    tokens: Sequence[int],
    lengths: Sequence[int],
    watch: Listener,
) -> Iterator[PromptLengthFigures]:
    params = SamplingParams(temperature=plan.temperatures[0], **UNFILTERED, seed=0, max_tokens=plan.max_tokens)
    pipeline.generate(tokens[: LENGTHS[0]], params)
    for length in lengths:
        prompt = list(islice(cycle(tokens), length % len(tokens), length % len(tokens) + length))
        repeats = [pipeline.generate(prompt, params).statistics for _ in range(plan.repeats)]
        watch.finished(f"{strategy}, {length:,} tokens")
        yield summary(strategy, length, repeats)
