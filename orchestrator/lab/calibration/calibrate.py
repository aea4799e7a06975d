"""Measures a device profile of this machine: starts workers, measures them, ends them. Prints nothing."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from orchestrator.core.options import Options
from orchestrator.lab.calibration.measure import (
    DRAFT_OVERLAP_WIDTH,
    TARGET_OVERLAP_WIDTH,
    OnCalibrationProgress,
    Times,
    draft_alone,
    draft_steps,
    overlapping,
    slow_down,
    target_alone,
    target_steps,
)
from orchestrator.lab.calibration.worker_harness import WorkerHarness
from orchestrator.lab.calibration.worker_load import RandomSequences
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.pair_choice import pair_for
from orchestrator.machine.pairs.expectations import weights_in
from orchestrator.machine.profiles.device_profiles import (
    ContextCost,
    DeviceProfile,
    DeviceTimes,
    ForwardTime,
    PrefillRate,
    SlowDown,
)
from orchestrator.machine.progress import silent
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.contracts.engines import DraftEngineName, draft_model
from protocol.errors import InputError
from protocol.messages.base import Role

Cores = Mapping[Role, tuple[int, ...]]
OVERLAP_WIDTHS = TARGET_OVERLAP_WIDTH, DRAFT_OVERLAP_WIDTH
"""Tokens of the target's and of the draft's steps in `both_at_once`."""


class OverlapTimes(NamedTuple):
    """Seconds of one step."""

    target_alone: float
    draft_alone: float
    target_beside: float
    draft_beside: float


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
    pair = pair_for(target, "mlx", draft, silent)
    if pair.draft.engine != "mlx":
        raise InputError("Calibration measures a draft model, and this target has none: pass --draft, or --pair demo.")
    folders = str(pair.target), str(pair.draft.folder)
    cores = machine_facts.partition_cores()
    apart, beside, factor = _measured(folders, engine, cores, samples, notice)
    notice("draft on the target's device")
    shared = _on_target_device(folders, cores, samples, notice)
    target_size, draft_size = (weights_in(Path(folder), bool(cores)) for folder in folders)
    source = f"measured on {machine_facts.chip()}, {date}"
    return DeviceProfile(
        name="this-machine",
        description=f"{machine_facts.chip()}: {folders[0]} and {folders[1]} ({engine})",
        target=device_times(apart, source, target_size),
        draft=device_times(beside, source, draft_size),
        draft_on_target_device=device_times(shared, source, draft_size),
        both_busy=slow_down_of(factor, source),
    )


def forward_times(target: Path, draft: Path, *, samples: int, notice: OnCalibrationProgress) -> dict[Role, Times]:
    """The times of the target and of the draft, each alone and on its own cores, the draft by MLX.

    Raises PipelineError if a worker fails.
    """
    notice("loading models")
    with _harness(str(target), str(draft), "mlx", machine_facts.partition_cores()) as harness:
        return {
            "target": target_alone(harness, harness.start("target"), samples, notice),
            "draft": draft_alone(harness, harness.start("draft"), samples, notice),
        }


def both_at_once(
    target: Path, draft: Path, engine: DraftEngineName, *, samples: int, notice: OnCalibrationProgress
) -> OverlapTimes:
    """A verification and a growth step of `OVERLAP_WIDTHS` tokens: each worker alone, then both always busy.

    `draft`: what `engine` runs, a model's folder or a converted one. Raises PipelineError if a worker fails.
    """
    notice("loading models")
    with _harness(str(target), str(draft), engine, machine_facts.partition_cores()) as harness:
        hellos = harness.start("target"), harness.start("draft")
        verified = target_steps(harness, RandomSequences(hellos[0]), [TARGET_OVERLAP_WIDTH], samples, notice)
        grown = draft_steps(harness, RandomSequences(hellos[1]), [DRAFT_OVERLAP_WIDTH], samples, notice)
        notice("both at once")
        together = overlapping(harness, hellos, samples)
        return OverlapTimes(verified[TARGET_OVERLAP_WIDTH], grown[DRAFT_OVERLAP_WIDTH], *together)


def device_times(times: Times, source: str, weights: int | None = None) -> DeviceTimes:
    """Measured times as part of a profile; `source` is noted at each number, `weights` are bytes."""
    steps = tuple(
        ForwardTime(width=width, milliseconds=round(seconds * 1000, 4), source=source)
        for width, seconds in sorted(times.steps.items())
    )
    rate = PrefillRate(tokens_per_second=round(times.prefill_rate, 1), source=source)
    context = None
    if times.context_seconds is not None:
        context = ContextCost(milliseconds_per_1000_tokens=round(1e6 * times.context_seconds, 4), source=source)
    return DeviceTimes(prefill=rate, steps=steps, weights=weights, context=context)


def slow_down_of(factor: float, source: str) -> SlowDown:
    return SlowDown(factor=round(factor, 3), source=source)


def to_toml(profile: DeviceProfile) -> str:
    """The profile as TOML that `load_profile` reads."""
    lines = [f"name = {_text(profile.name)}", f"description = {_text(profile.description)}"]
    for name in ("target", "draft", "draft_on_target_device"):
        lines += ["", f"[{name}]", *_device(getattr(profile, name))]
    slow_down = profile.both_busy
    lines += ["", "[both_busy]", f"factor = {slow_down.factor}", f"source = {_text(slow_down.source)}"]
    return "\n".join(lines) + "\n"


def _measured(
    folders: tuple[str, str], engine: DraftEngineName, cores: Cores, samples: int, notice: OnCalibrationProgress
) -> tuple[Times, Times, float]:
    """The times of target and draft without overlap, and the slow-down with overlap."""
    converts = draft_model(engine) == "package"
    draft = str(converted_draft(folders[1])) if converts else folders[1]
    notice("loading models")
    with _harness(folders[0], draft, engine, cores) as harness:
        hellos = harness.start("target"), harness.start("draft")
        alone = target_alone(harness, hellos[0], samples, notice), draft_alone(harness, hellos[1], samples, notice)
        return *alone, slow_down(harness, hellos, alone, samples, notice)


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


def _device(times: DeviceTimes) -> list[str]:
    prefill = times.prefill
    rate = f"tokens_per_second = {prefill.tokens_per_second}, source = {_text(prefill.source)}"
    steps = [
        f"    {{ width = {step.width}, milliseconds = {step.milliseconds}, source = {_text(step.source)} }},"
        for step in times.steps
    ]
    lines = [] if times.weights is None else [f"weights = {times.weights}"]
    lines += [f"prefill = {{ {rate} }}", f'shape = "{times.shape}"', "steps = [", *steps, "]"]
    if (context := times.context) is not None:
        time = f"milliseconds_per_1000_tokens = {context.milliseconds_per_1000_tokens}"
        queries = f"vector_queries = {context.vector_queries}"
        lines.append(f"context = {{ {time}, {queries}, source = {_text(context.source)} }}")
    if (sequence := times.sequence) is not None:
        lines.append(f"sequence = {{ milliseconds = {sequence.milliseconds}, source = {_text(sequence.source)} }}")
    return lines


def _text(value: str) -> str:
    """A basic string: TOML has JSON's escapes."""
    return json.dumps(value, ensure_ascii=False)
