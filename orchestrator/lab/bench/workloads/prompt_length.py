"""Speed and overhead by the length of the prompt. Prints nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling.presets import UNFILTERED
from orchestrator.api.sampling.sampling_params import SamplingParams
from orchestrator.core.options import StrategyName
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt
from orchestrator.lab.bench.results.figures import kept_pace
from orchestrator.lab.bench.trials import joined_tokens
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


def measure(
    plan: BenchPlan, prompts: Sequence[BenchPrompt], on_count: Callable[[int], None], on_length: Callable[[str], None]
) -> tuple[list[PromptLengthFigures], int]:
    """Every strategy of the plan with every length, one pipeline after the other; and the target's context.

    `on_count` is called with the number of measurements, `on_length` with the name of each finished one.
    """
    tokens = joined_tokens(prompts, plan)
    results: list[PromptLengthFigures] = []
    context = 0
    models = plan.models()
    for strategy in plan.strategies:
        with Pipeline(pace=plan.pace, arena_memory=0, **models.pipeline(strategy)) as pipeline:
            context = pipeline.state().context
            fitting = lengths(context, plan.max_tokens)
            on_count(len(plan.strategies) * len(fitting))
            results += _with_all_lengths(strategy, pipeline, plan, tokens, fitting, on_length)
    return results, context


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
    on_length: Callable[[str], None],
) -> Iterator[PromptLengthFigures]:
    params = SamplingParams(temperature=plan.temperatures[0], **UNFILTERED, seed=0, max_tokens=plan.max_tokens)
    pipeline.generate(tokens[: LENGTHS[0]], params)
    for length in lengths:
        prompt = list(islice(cycle(tokens), length % len(tokens), length % len(tokens) + length))
        repeats = [pipeline.generate(prompt, params).statistics for _ in range(plan.repeats)]
        on_length(f"{strategy}, {length:,} tokens")
        yield summary(strategy, length, repeats)
