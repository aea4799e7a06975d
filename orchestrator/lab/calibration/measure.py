"""Times of forwards and prefills in real worker processes, without and with overlap. Medians in seconds."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from orchestrator.lab.calibration.worker_harness import (
    PROMPT_TOKENS,
    GrowthLoad,
    RandomSequences,
    VerifyLoad,
    WorkerHarness,
)
from protocol.errors import InputError
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow, Hello, Prefilled, Stop, Verdict

WIDTHS = (1, 2, 4, 8, 16, 32)
_GPU_WIDTHS = (*range(1, 18), 24, 32)
"""A GPU's kernels change at some widths, so no line between two measured ones gives the others."""
_WARM_UP = 3
"""Unmeasured forwards of each width: kernels are compiled in them."""
TARGET_OVERLAP_WIDTH, DRAFT_OVERLAP_WIDTH = 8, 8
"""Widths with overlap."""
_PROMPT_TOKENS = 512
_LONG_CONTEXT, _LONG_PREFILL_SECONDS = 2048, 5.0
"""Tokens of the long context, fewer if their prefill would take longer than this."""

OnCalibrationProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Times:
    """One model on one device."""

    prefill_rate: float
    """Tokens a second."""
    steps: dict[int, float]
    """Seconds by width."""
    context_seconds: float | None = None
    """Seconds that each token of the context adds to a forward of one token; None if that was not measured."""


def device_widths(hello: Hello) -> tuple[int, ...]:
    """The widths to measure on the worker's device. Raises InputError for a target that has only one."""
    if hello.level == "plain":
        raise InputError(
            f"{hello.model} evaluates one token a forward, so there are no widths to measure: choose another target."
        )
    return _GPU_WIDTHS if "gpu" in hello.device else WIDTHS


def target_alone(harness: WorkerHarness, hello: Hello, samples: int, notice: OnCalibrationProgress) -> Times:
    """`samples` forwards of each width that fits the device."""
    sequences = RandomSequences(hello)
    notice("target, prompts")
    rate = median(_target_rates(harness, sequences))
    steps = target_steps(harness, sequences, device_widths(hello), samples, notice)
    notice("target, a long context")
    return Times(rate, steps, _context_seconds(harness, sequences, rate, samples))


def target_steps(
    harness: WorkerHarness,
    sequences: RandomSequences,
    widths: Iterable[int],
    samples: int,
    notice: OnCalibrationProgress,
) -> dict[int, float]:
    """Seconds of a verification by its width."""
    verifying = _verifying(harness, sequences)
    steps: dict[int, float] = {}
    for width in widths:
        notice(f"target, {width} tokens")
        taken = []
        for _ in range(_WARM_UP + samples):
            if not verifying.has_room(width):
                harness.send("target", Stop(verifying.start.sequence))
                verifying = _verifying(harness, sequences)
            taken.append(_verify(harness, verifying, width))
        steps[width] = median(taken[_WARM_UP:])
    harness.send("target", Stop(verifying.start.sequence))
    return steps


def _context_seconds(harness: WorkerHarness, sequences: RandomSequences, rate: float, samples: int) -> float | None:
    """Forwards of one token behind a short and a long context, in turns, so that a change of the clock meets both.

    None if the model's context is too short to tell them apart.
    """
    tokens = min(_LONG_CONTEXT, sequences.context // 2, round(rate * _LONG_PREFILL_SECONDS))
    if tokens < 4 * PROMPT_TOKENS:
        return None
    both = [_verifying(harness, sequences, length) for length in (PROMPT_TOKENS, tokens)]
    taken: list[list[float]] = [[], []]
    for _ in range(_WARM_UP + samples):
        for verifying, times in zip(both, taken, strict=True):
            times.append(_verify(harness, verifying, 1))
    for verifying in both:
        harness.send("target", Stop(verifying.start.sequence))
    short, long = (median(times[_WARM_UP:]) for times in taken)
    return max(0.0, long - short) / (tokens - PROMPT_TOKENS)


def draft_alone(harness: WorkerHarness, hello: Hello, samples: int, notice: OnCalibrationProgress) -> Times:
    """`samples` growth steps of each width that fits the device."""
    sequences = RandomSequences(hello)
    notice("draft, prompts")
    rate = median(_draft_rates(harness, sequences))
    return Times(rate, draft_steps(harness, sequences, device_widths(hello), samples, notice))


def draft_steps(
    harness: WorkerHarness,
    sequences: RandomSequences,
    widths: Iterable[int],
    samples: int,
    notice: OnCalibrationProgress,
) -> dict[int, float]:
    """Seconds of a growth step by its width."""
    steps: dict[int, float] = {}
    for width in widths:
        notice(f"draft, {width} tokens")
        taken: list[float] = []
        growing = GrowthLoad(sequences, width)
        _begin(harness, growing)
        while len(taken) < _WARM_UP + samples:
            grow = harness.await_message(Grow)
            if grow.evaluated == width:
                taken.append(grow.seconds)
            if growing.heard(grow.sequence, len(grow.tokens)):
                _begin(harness, growing)
        _end(harness, growing)
        steps[width] = median(taken[_WARM_UP:])
    return steps


def slow_down(
    harness: WorkerHarness,
    hellos: tuple[Hello, Hello],
    alone: tuple[Times, Times],
    samples: int,
    notice: OnCalibrationProgress,
) -> float:
    """The time of a forward with overlap relative to the time without: the larger of the two workers' ratios.

    `hellos` and `alone` are the target's and the draft's. Never below 1.
    """
    notice("both at once")
    together = overlapping(harness, hellos, samples)
    widths = TARGET_OVERLAP_WIDTH, DRAFT_OVERLAP_WIDTH
    ratios = [both / times.steps[width] for both, times, width in zip(together, alone, widths, strict=True)]
    return max(1.0, *ratios)


def overlapping(harness: WorkerHarness, hellos: tuple[Hello, Hello], samples: int) -> tuple[float, float]:
    """Seconds of a verification and of a growth step while both workers are always busy."""
    sequences = RandomSequences(hellos[0], seed=1)
    verifying = _verifying(harness, sequences)
    growing = GrowthLoad(RandomSequences(hellos[1], seed=1), DRAFT_OVERLAP_WIDTH)
    _begin(harness, growing)
    harness.send("target", verifying.ask(TARGET_OVERLAP_WIDTH))
    verified: list[float] = []
    grown: list[float] = []
    while min(len(verified), len(grown)) < _WARM_UP + samples:
        match harness.receive():
            case Verdict() as verdict:
                verified.append(verdict.seconds)
                verifying.heard(verdict)
                if not verifying.has_room(TARGET_OVERLAP_WIDTH):
                    verifying = _verifying(harness, sequences)
                harness.send("target", verifying.ask(TARGET_OVERLAP_WIDTH))
            case Grow() as grow:
                if grow.evaluated == DRAFT_OVERLAP_WIDTH:
                    grown.append(grow.seconds)
                if growing.heard(grow.sequence, len(grow.tokens)):
                    _begin(harness, growing)
            case _:
                pass
    return median(verified[_WARM_UP:]), median(grown[_WARM_UP:])


def _verify(harness: WorkerHarness, verifying: VerifyLoad, width: int) -> float:
    harness.send("target", verifying.ask(width))
    verdict = harness.await_message(Verdict)
    verifying.heard(verdict)
    return verdict.seconds


def _verifying(harness: WorkerHarness, sequences: RandomSequences, tokens: int = PROMPT_TOKENS) -> VerifyLoad:
    """A new sequence whose prompt of `tokens` tokens the target has prefilled."""
    verifying = VerifyLoad(sequences, tokens)
    harness.send("target", verifying.start)
    harness.await_message(Prefilled)
    return verifying


def _target_rates(harness: WorkerHarness, sequences: RandomSequences) -> Iterator[float]:
    for repeat in range(4):
        start = sequences.start(min(_PROMPT_TOKENS, sequences.context // 2))
        harness.send("target", start)
        prefilled = harness.await_message(Prefilled)
        harness.send("target", Stop(start.sequence))
        if repeat:
            yield prefilled.tokens / prefilled.seconds


def _draft_rates(harness: WorkerHarness, sequences: RandomSequences) -> Iterator[float]:
    """A draft does not report its prefill: the time to its first Grow minus that step's own time."""
    for repeat in range(4):
        start = sequences.start(min(_PROMPT_TOKENS, sequences.context // 2), BestFirst(width=1, fan=2))
        began = time.perf_counter()
        harness.send("draft", start)
        grow = _first_of(harness, start.sequence)
        seconds = time.perf_counter() - began - grow.seconds
        harness.send("draft", Stop(start.sequence))
        if repeat:
            yield (len(start.tokens) - 1) / seconds


def _first_of(harness: WorkerHarness, sequence: int) -> Grow:
    """Skips late Grow messages of earlier sequences."""
    while True:
        grow = harness.await_message(Grow)
        if grow.sequence == sequence:
            return grow


def _begin(harness: WorkerHarness, growing: GrowthLoad) -> None:
    for message in growing.begin():
        harness.send("draft", message)


def _end(harness: WorkerHarness, growing: GrowthLoad) -> None:
    for message in growing.end():
        harness.send("draft", message)
