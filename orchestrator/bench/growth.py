"""How speed and overhead change with the prompt's length and with the number of requests at once. Prints nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from orchestrator.bench.trials import Plan
from orchestrator.checkpoints import resolve
from orchestrator.core.options import StrategyName
from orchestrator.core.tally import TOLERATED_OVERRUNS
from orchestrator.pipeline import Pipeline
from orchestrator.sampling_params import SamplingParams
from orchestrator.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.messages import Pace, Statistics

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Prompt tokens."""
REQUESTS = (1, 2, 4, 8)
"""At once, each with a prompt of the shortest length."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are served together."""

    prompt_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a load: when its last token arrived (seconds on any clock), and its figures."""

    ended: float
    statistics: Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One strategy under one load; medians over repeats."""

    strategy: str
    prompt_tokens: int
    requests: int
    tokens_per_second: float
    """Of all requests together."""
    tokens_per_round: float
    overhead_per_round: float
    """Seconds of a round in which the target verified nothing, waiting for the draft included; mean."""
    representative: bool
    """It kept to its pace, if it was given one."""


def loads(context: int, max_tokens: int) -> list[Load]:
    """Lengths for which the context has room, one request at a time; then more and more short ones."""
    fitting = [length for length in LENGTHS if length + max_tokens <= context]
    if not fitting:
        raise InputError(
            f"The target's context of {context:,} has no room for {LENGTHS[0]} tokens and {max_tokens:,} more: "
            "lower --max-tokens."
        )
    return [*(Load(length, 1) for length in fitting), *(Load(fitting[0], count) for count in REQUESTS[1:])]


def left_out(context: int, max_tokens: int) -> str:
    """A sentence about the lengths for which there is no room, or nothing."""
    missing = [f"{length:,}" for length in LENGTHS if length + max_tokens > context]
    return f"The target's context of {context:,} has no room for prompts of {', '.join(missing)}." if missing else ""


def measure(
    plan: Plan, texts: Sequence[str], on_count: Callable[[int], None], on_load: Callable[[str], None]
) -> tuple[list[Growth], int]:
    """Every strategy of the plan under every load, one pipeline after the other; and the target's context.

    `on_count` is told how many measurements there will be, `on_load` the name of each that is done.
    """
    codec = TextCodec(resolve(plan.target, "target"))
    tokens = [token for text in texts for token in codec.encode(text)]
    if not tokens:
        raise InputError("The prompts have no tokens: give every line of them at least one word.")
    results: list[Growth] = []
    context = 0
    for strategy in plan.strategies:
        with Pipeline(plan.target, plan.draft, strategy=strategy, pace=plan.pace, kv_memory=0) as pipeline:
            context = pipeline.state().context
            fitting = loads(context, plan.max_tokens)
            on_count(len(plan.strategies) * len(fitting))
            results += _under_all_loads(strategy, pipeline, plan, tokens, fitting, on_load)
    return results, context


def summed_up(strategy: str, load: Load, repeats: Sequence[Sequence[Served]]) -> Growth:
    """One figure of each kind for a load."""
    figures = [together(served) for served in repeats]
    everything = [one.statistics for served in repeats for one in served]
    return Growth(
        strategy=strategy,
        prompt_tokens=load.prompt_tokens,
        requests=load.requests,
        tokens_per_second=median(rate for rate, _ in figures),
        tokens_per_round=median(one.tokens_per_round for one in everything),
        overhead_per_round=median(overhead for _, overhead in figures),
        representative=_kept_pace([one.pace for one in everything if one.pace is not None]),
    )


def together(served: Sequence[Served]) -> tuple[float, float]:
    """Tokens a second of requests that were served at once, and seconds a round without verification.

    The time runs from the first request's first round to the last one's last token, less the prompts that
    the target read in between.
    """
    decoding = [one.statistics.generated_tokens / one.statistics.tokens_per_second for one in served]
    begins = [one.ended - seconds for one, seconds in zip(served, decoding, strict=True)]
    first = begins.index(min(begins))
    reading = sum(one.statistics.prefill_seconds for index, one in enumerate(served) if index != first)
    seconds = max(one.ended for one in served) - begins[first] - reading
    verifying = sum(one.statistics.target_busy * each for one, each in zip(served, decoding, strict=True))
    rounds = sum(one.statistics.rounds for one in served)
    generated = sum(one.statistics.generated_tokens for one in served)
    return generated / seconds, max(0.0, seconds - verifying) / rounds


def _kept_pace(paces: Sequence[Pace]) -> bool:
    return sum(pace.overruns for pace in paces) <= TOLERATED_OVERRUNS * sum(pace.forwards for pace in paces)


def _under_all_loads(
    strategy: StrategyName,
    pipeline: Pipeline,
    plan: Plan,
    tokens: Sequence[int],
    loads: Sequence[Load],
    on_load: Callable[[str], None],
) -> Iterator[Growth]:
    params = SamplingParams(temperature=plan.temperatures[0], seed=0, max_tokens=plan.max_tokens)
    _serve(pipeline, [tokens[: LENGTHS[0]]], params)
    for load in loads:
        prompts = [_prompt(tokens, load.prompt_tokens, index) for index in range(load.requests)]
        repeats = [_serve(pipeline, prompts, params) for _ in range(plan.repeats)]
        on_load(f"{strategy}, {load.prompt_tokens:,} tokens, {load.requests} at once")
        yield summed_up(strategy, load, repeats)


def _serve(pipeline: Pipeline, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Served]:
    def one(prompt: Sequence[int]) -> Served:
        statistics = pipeline.generate(prompt, params).statistics
        return Served(time.perf_counter(), statistics)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(one, prompts))


def _prompt(tokens: Sequence[int], length: int, index: int) -> list[int]:
    """`length` tokens, beginning elsewhere for each request: none may profit from another one's prefix."""
    begin = (index * 97 + length) % len(tokens)
    return list(islice(cycle(tokens), begin, begin + length))
