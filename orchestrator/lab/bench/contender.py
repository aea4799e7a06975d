"""What the bench compares: the task that every contender gets, its result, and our pipelines as contenders."""

import time
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from protocol.messages.client import Pace

Family = Literal["mlx-lm", "coupled", "rival"]
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
    hit_rate: float | None = None
    acceptance_rate: float | None = None
    """Accepted tokens divided by draft tokens that the target verified."""
    target_busy: float | None = None
    draft_busy: float | None = None
    overhead_per_round: float | None = None
    """Seconds."""
    time_to_first_token: float | None = None
    """Seconds from the request to the first token at the client, prefill included. None if the prefill has not the
    speed that is compared."""
    total_time: float | None = None
    """The same to the last token."""
    arrivals: tuple[float, ...] = ()
    """Seconds at which the client got each token, by the client's clock. Empty: not recorded."""
    pace: Pace | None = None
    """Of a paced contender."""


class Contender(Protocol):
    """One way to decode: loaded, and idle between tasks."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Family: ...

    def generate(self, task: GenerationTask) -> TimedGeneration: ...


class PipelineContender:
    """A started pipeline of ours. It keeps its estimates from task to task, as in normal use."""

    family: Family = "coupled"

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
            hit_rate=figures.hit_rate,
            acceptance_rate=figures.acceptance_rate,
            target_busy=figures.target_busy,
            draft_busy=figures.draft_busy,
            overhead_per_round=figures.overhead_per_round,
            time_to_first_token=arrivals[0] if arrivals else None,
            total_time=arrivals[-1] if arrivals else None,
            arrivals=tuple(arrivals),
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
        hidden = rounds * (slow.overhead_per_round or 0.0) * (1 - 1 / self._factor)
        # Seconds there for one here: what happens in between is spread evenly.
        scale = 1 / self._factor + hidden / seconds
        busy = 1 / (self._factor * scale)
        return replace(
            slow,
            tokens_per_second=slow.tokens_per_second / scale,
            target_busy=None if slow.target_busy is None else slow.target_busy * busy,
            draft_busy=None if slow.draft_busy is None else slow.draft_busy * busy,
            time_to_first_token=None if slow.time_to_first_token is None else slow.time_to_first_token * scale,
            total_time=None if slow.total_time is None else slow.total_time * scale,
            arrivals=tuple(arrival * scale for arrival in slow.arrivals),
        )
