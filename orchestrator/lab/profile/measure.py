"""A profile from start to end: a traced pipeline, one request a temperature, then a replay of each worker alone."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.result import Result
from orchestrator.api.sampling.presets import UNFILTERED
from orchestrator.api.sampling.sampling_params import SamplingParams
from orchestrator.lab.profile.analysis.figures import ProfileFigures, request_profiles
from orchestrator.lab.profile.run import TracedRun, WorkerLife, load
from orchestrator.lab.profile.worker_replay import REPLAYED, replays
from orchestrator.machine.hardware import chip
from protocol.shown_names import device_name

WARM_UP_TOKENS = 16
"""Generated at each temperature before anything is measured."""

OnProfileProgress = Callable[[str], None]
"""Called with the name of each step."""


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """What to profile. Options are those of `Pipeline`."""

    prompt: str | Sequence[int]
    temperatures: tuple[float, ...]
    max_tokens: int
    seed: int
    options: dict[str, Any]

    def sampling(self, temperature: float, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, **UNFILTERED, seed=self.seed, max_tokens=tokens)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The figures, and the run that they come from."""

    profile: ProfileFigures
    run: TracedRun


def measure(task: ProfileTask, notice: OnProfileProgress = lambda _: None) -> MeasuredRun:
    """Raises InputError for what can't be profiled, PipelineError if a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(trace=folder, **task.options)
        results = _generate(pipeline, task, notice)
        run = load(Path(folder))
        alone: dict[str, WorkerLife] = {}
        for name, life in replays(run, Path(folder), task.options.get("draft_command", ())):
            notice(f"replayed {name} alone")
            if life is not None:
                alone[name] = life
    return MeasuredRun(_profile(pipeline, run, alone, results), run)


def _generate(pipeline: Pipeline, task: ProfileTask, notice: OnProfileProgress) -> list[Result]:
    """Warm up at every temperature, then measure every temperature. A closed pipeline has written its trace."""
    notice("loading models")
    with pipeline:
        for temperature in task.temperatures:
            pipeline.generate(task.prompt, task.sampling(temperature, min(WARM_UP_TOKENS, task.max_tokens)))
        results = []
        for temperature in task.temperatures:
            notice(f"generating at temperature {temperature:g}")
            results.append(pipeline.generate(task.prompt, task.sampling(temperature, task.max_tokens)))
    return results


def _profile(
    pipeline: Pipeline, run: TracedRun, alone: dict[str, WorkerLife], results: Sequence[Result]
) -> ProfileFigures:
    error = run.clock_error
    return ProfileFigures(
        strategy=pipeline.strategy,
        machine=(chip(), *(f"{life.worker.role}: {device_name(life.worker.device)}" for life in run.lives)),
        prompt_tokens=results[0].statistics.prompt_tokens,
        clock_error=None if error is None else error / 1e9,
        lost=run.lost,
        notes=tuple(_notes(pipeline.note, run, alone, results)),
        requests=tuple(request_profiles(run, alone, [result.statistics for result in results])),
    )


def _notes(note: str, run: TracedRun, alone: dict[str, WorkerLife], results: Sequence[Result]) -> list[str]:
    notes = [note] if note else []
    if run.lost:
        notes.append(f"{run.lost:,} spans and messages were overwritten by newer ones: generate fewer tokens.")
    roles = [life.worker.role for life in run.lives]
    notes += [
        f"The {role} died and was started again: the figures are not valid."
        for role in dict.fromkeys(roles)
        if roles.count(role) > 1
    ]
    notes += [
        f"{life.name} left no spans: its process does not serve through protocol.worker.process, or was killed."
        for life in run.lives
        if not life.spans
    ]
    notes += [
        f"{life.name} could not be replayed alone, so there is no overlap efficiency."
        for life in run.lives
        if life.worker.role in REPLAYED and life.spans and life.name not in alone
    ]
    if run.clock_error is None:
        notes.append("A worker sent no clock, so its spans may be shifted against the others.")
    if any(result.statistics.pace is not None and not result.statistics.pace.valid for result in results):
        notes.append("Too many forwards overran the pace: this machine is too slow for the device, or too busy.")
    return notes
