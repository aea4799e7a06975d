"""Measures a device profile of this machine: times of forwards and prefills in worker processes, alone and at once."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from orchestrator.core.options import Options
from orchestrator.lab.findings import Column, Findings, Table, Value
from orchestrator.lab.worker_harness import PROMPT_TOKENS, GrowthLoad, RandomSequences, VerifyLoad, WorkerHarness
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.draft_choice import measured_pair
from orchestrator.machine.profiles.device_profiles import (
    ContextCost,
    DeviceProfile,
    DeviceTimes,
    ForwardTime,
    PrefillRate,
    SlowDown,
)
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.errors import InputError
from protocol.messages.base import Role
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow, Hello, Prefilled, Stop, Verdict

WIDTHS = (1, 2, 4, 8, 16, 32)
_GPU_WIDTHS = (*range(1, 18), 24, 32)
"""A GPU's kernels change at some widths, so no line between two measured ones gives the others."""
_WARM_UP = 3
"""Unmeasured forwards of each width: kernels are compiled in them."""
OVERLAP_WIDTH = 8
"""Tokens of the target's and of the draft's steps that are measured at once."""
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
                harness.send("target", Stop(verifying.start.request))
                verifying = _verifying(harness, sequences)
            taken.append(_verify(harness, verifying, width))
        steps[width] = median(taken[_WARM_UP:])
    harness.send("target", Stop(verifying.start.request))
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
        harness.send("target", Stop(verifying.start.request))
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
            if growing.heard(grow.request, len(grow.tokens)):
                _begin(harness, growing)
        for message in growing.end():
            harness.send("draft", message)
        steps[width] = median(taken[_WARM_UP:])
    return steps


def overlapping(harness: WorkerHarness, hellos: tuple[Hello, Hello], samples: int) -> tuple[list[float], list[float]]:
    """Seconds of verifications and of growth steps while both workers are always busy."""
    sequences = RandomSequences(hellos[0], seed=1)
    verifying = _verifying(harness, sequences)
    growing = GrowthLoad(RandomSequences(hellos[1], seed=1), OVERLAP_WIDTH)
    _begin(harness, growing)
    harness.send("target", verifying.ask(OVERLAP_WIDTH))
    verified: list[float] = []
    grown: list[float] = []
    while min(len(verified), len(grown)) < _WARM_UP + samples:
        match harness.receive():
            case Verdict() as verdict:
                verified.append(verdict.seconds)
                verifying.heard(verdict)
                if not verifying.has_room(OVERLAP_WIDTH):
                    verifying = _verifying(harness, sequences)
                harness.send("target", verifying.ask(OVERLAP_WIDTH))
            case Grow() as grow:
                if grow.evaluated == OVERLAP_WIDTH:
                    grown.append(grow.seconds)
                if growing.heard(grow.request, len(grow.tokens)):
                    _begin(harness, growing)
            case _:
                pass
    return verified[_WARM_UP:], grown[_WARM_UP:]


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
        harness.send("target", Stop(start.request))
        if repeat:
            yield prefilled.tokens / prefilled.seconds


def _draft_rates(harness: WorkerHarness, sequences: RandomSequences) -> Iterator[float]:
    """A draft does not report its prefill: the time to its first Grow minus that step's own time."""
    for repeat in range(4):
        start = sequences.start(min(_PROMPT_TOKENS, sequences.context // 2), BestFirst(width=1, fan=2))
        began = time.perf_counter()
        harness.send("draft", start)
        # Late growth of earlier sequences is skipped.
        while (grow := harness.await_message(Grow)).request != start.request:
            pass
        seconds = time.perf_counter() - began - grow.seconds
        harness.send("draft", Stop(start.request))
        if repeat:
            yield (len(start.tokens) - 1) / seconds


def _begin(harness: WorkerHarness, growing: GrowthLoad) -> None:
    for message in growing.begin():
        harness.send("draft", message)


Cores = Mapping[Role, tuple[int, ...]]


class OverlapTimes(NamedTuple):
    """Seconds of one step."""

    target_alone: float
    draft_alone: float
    target_beside: float
    draft_beside: float
    slowest: float
    """Of the draft's steps beside the target: one in a hundred takes longer."""


def calibrate(
    target: str | None,
    draft: str | None,
    engine: DraftEngineName,
    *,
    date: str,
    samples: int,
    notice: OnCalibrationProgress,
) -> DeviceProfile:
    """Measure this pair on this machine; the draft on its own device by `engine`, and by MLX on the target's.

    `date` is written beside each number; `samples` forwards are measured of each kind; `notice` is called with the
    current measurement. Raises InputError for models that can't be loaded, PipelineError if a worker fails.
    """
    pair = measured_pair(target, draft)
    if pair.draft.engine != "mlx":
        raise InputError("Calibration measures a draft model, and this target has none: pass --draft, or --pair demo.")
    folders = str(pair.target), str(pair.draft.folder)
    cores = machine_facts.partition_cores()
    apart, beside, factor = _measured(folders, engine, cores, samples, notice)
    notice("draft on the target's device")
    shared = _on_target_device(folders, cores, samples, notice)
    source = f"measured on {machine_facts.chip()}, {date}"
    return DeviceProfile(
        name="this-machine",
        description=f"{machine_facts.chip()}: {folders[0]} and {folders[1]} ({engine})",
        target=device_times(apart, source),
        draft=device_times(beside, source),
        draft_on_target_device=device_times(shared, source),
        both_busy=slow_down_of(factor, source),
    )


def both_at_once(
    target: Path, draft: Path, engine: DraftEngineName, *, samples: int, notice: OnCalibrationProgress
) -> OverlapTimes:
    """A verification and a growth step of OVERLAP_WIDTH tokens: each worker alone, then both always busy.

    `draft`: what `engine` runs, a model's folder or a converted one. Raises PipelineError if a worker fails.
    """
    notice("loading models")
    with _harness(str(target), str(draft), engine, machine_facts.partition_cores()) as harness:
        hellos = harness.start("target"), harness.start("draft")
        verified = target_steps(harness, RandomSequences(hellos[0]), [OVERLAP_WIDTH], samples, notice)
        grown = draft_steps(harness, RandomSequences(hellos[1]), [OVERLAP_WIDTH], samples, notice)
        notice("both at once")
        verifying, growing = overlapping(harness, hellos, samples)
        alone = verified[OVERLAP_WIDTH], grown[OVERLAP_WIDTH]
        slowest = sorted(growing)[99 * len(growing) // 100]
        return OverlapTimes(*alone, median(verifying), median(growing), slowest)


def device_times(times: Times, source: str) -> DeviceTimes:
    """Measured times as part of a profile; `source` is noted at each number."""
    steps = tuple(
        ForwardTime(width=width, milliseconds=round(seconds * 1000, 4), source=source)
        for width, seconds in sorted(times.steps.items())
    )
    rate = PrefillRate(tokens_per_second=round(times.prefill_rate, 1), source=source)
    context = None
    if times.context_seconds is not None:
        context = ContextCost(milliseconds_per_1000_tokens=round(1e6 * times.context_seconds, 4), source=source)
    return DeviceTimes(prefill=rate, steps=steps, context=context)


def slow_down_of(factor: float, source: str) -> SlowDown:
    return SlowDown(factor=round(factor, 3), source=source)


_NOTE = "A target's forward verifies that many tokens; a draft's is a growth step over that many nodes. Medians."


def findings(profile: DeviceProfile) -> Findings:
    """What was measured, by width; nothing is interpolated."""
    devices = {
        "target": profile.target,
        "draft": profile.draft,
        "draft on the target's device": profile.draft_on_target_device,
    }
    times = [{step.width: step.milliseconds for step in device.steps} for device in devices.values()]
    widths = sorted({width for steps in times for width in steps})
    columns = ("tokens", *(Column(f"{name}, ms", ".2f") for name in devices))
    rows = tuple((width, *(steps.get(width) for steps in times)) for width in widths)
    return Findings(
        title=profile.description,
        conditions=(profile.description,),
        values=(*_values(profile, devices),),
        tables=(Table("Forwards by width", columns, rows, _NOTE),),
        figures=msgspec.to_builtins(profile),
    )


def _values(profile: DeviceProfile, devices: Mapping[str, DeviceTimes]) -> Iterator[Value]:
    yield Value("slow-down while both compute", profile.both_busy.factor, "×")
    for name, device in devices.items():
        yield Value(f"{name}: prompt", device.prefill.tokens_per_second, "tokens/s")
        if device.context is not None:
            more = device.context.milliseconds_per_1000_tokens
            yield Value(f"{name}: 1,000 more tokens of context", more, "ms")


def to_toml(profile: DeviceProfile) -> str:
    """The profile as TOML that `load_profile` reads."""
    fields = msgspec.to_builtins(profile)
    return "".join(f"{name} = {_toml(value)}\n" for name, value in fields.items())


def _toml(value: Any) -> str:
    match value:
        case dict():
            fields = (f"{name} = {_toml(each)}" for name, each in value.items() if each is not None)
            return f"{{ {', '.join(fields)} }}"
        case list() | tuple():
            return "\n    ".join(["[", *(f"{_toml(each)}," for each in value)]) + "\n]"
        case _:
            # A basic string: TOML has JSON's escapes.
            return json.dumps(value, ensure_ascii=False)


def _measured(
    folders: tuple[str, str], engine: DraftEngineName, cores: Cores, samples: int, notice: OnCalibrationProgress
) -> tuple[Times, Times, float]:
    """The times of target and draft without overlap, and the time of a forward with overlap relative to that: the
    larger of the two workers' ratios, never below 1."""
    converts = draft_model(engine) == "package"
    draft = str(converted_draft(folders[1])) if converts else folders[1]
    notice("loading models")
    with _harness(folders[0], draft, engine, cores) as harness:
        hellos = harness.start("target"), harness.start("draft")
        alone = target_alone(harness, hellos[0], samples, notice), draft_alone(harness, hellos[1], samples, notice)
        notice("both at once")
        together = overlapping(harness, hellos, samples)
        ratios = [median(both) / times.steps[OVERLAP_WIDTH] for both, times in zip(together, alone, strict=True)]
        return *alone, max(1.0, *ratios)


def _on_target_device(folders: tuple[str, str], cores: Cores, samples: int, notice: OnCalibrationProgress) -> Times:
    with _harness(*folders, "mlx", dict.fromkeys(cores, cores["target"])) as harness:
        return draft_alone(harness, harness.start("draft"), samples, notice)


@contextmanager
def _harness(target: str, draft: str, engine: DraftEngineName, cores: Cores) -> Iterator[WorkerHarness]:
    session = Session.create()
    setup = OrchestratorSetup(
        session=str(session.folder),
        address=session.client_address,
        target=target,
        draft=draft,
        draft_engine=engine,
        options=Options(arena_memory=0),
    )
    try:
        with WorkerHarness(setup, session, cores) as harness:
            yield harness
    finally:
        session.remove()
