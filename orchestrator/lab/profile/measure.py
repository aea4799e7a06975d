"""A profile from start to end: a traced pipeline, requests at each temperature, then a replay of each worker alone."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from orchestrator.api.pipeline import Pipeline
from orchestrator.api.result import Result
from orchestrator.api.sampling import UNFILTERED, SamplingParams
from orchestrator.api.settings import PipelineSettings
from orchestrator.lab.bench.figures import FEWEST_PROMPTS
from orchestrator.lab.profile.figures import ProfileFigures, RequestProfile, expected_rounds, repeated, request_profiles
from orchestrator.lab.profile.run import TracedRun, WorkerLife, load, load_life
from orchestrator.machine.hardware import chip, worker_environment
from orchestrator.runtime.recording import replay
from protocol.child_process import module_command
from protocol.errors import PipelineError
from protocol.kv.segments import unlink_owned
from protocol.messages.base import Role
from protocol.shown_names import device_name
from protocol.worker.process import WorkerSetup

REPLAYED: tuple[Role, ...] = ("target", "draft")


def replays(run: TracedRun, folder: Path, draft_command: Sequence[str] = ()) -> Iterator[tuple[str, WorkerLife | None]]:
    """Each worker's name with the spans of its replay, one after the other; None if it left no script.

    `folder`: folder of the trace. A worker has the cores, environment and pace of the run, without the slow-down by
    overlap. Raises PipelineError if a replay fails.
    """
    for life in run.lives:
        if life.worker.role in REPLAYED:
            yield life.name, _replay(life, folder, tuple(draft_command))


def _replay(life: WorkerLife, folder: Path, draft_command: tuple[str, ...]) -> WorkerLife | None:
    script, setup = folder / f"{life.name}.script", folder / f"{life.name}.setup"
    if not (script.is_file() and setup.is_file()):
        return None
    role = life.worker.role
    command = draft_command if role == "draft" and draft_command else module_command(f"{role}_worker")
    with tempfile.TemporaryDirectory() as alone:
        _work(command, role, _setup_alone(setup, script, alone), life.name)
        return load_life(Path(alone) / f"{life.name}.spans", life.worker)


def _setup_alone(setup: Path, script: Path, folder: str) -> WorkerSetup:
    then = msgspec.json.decode(setup.read_bytes(), type=WorkerSetup)
    pace = then.pace and msgspec.structs.replace(then.pace, slow_down=1.0)
    owner = None if then.owner is None else os.getpid()
    return msgspec.structs.replace(then, life=None, owner=owner, pace=pace, trace=folder, replay=str(script))


def _work(command: Sequence[str], role: Role, setup: WorkerSetup, name: str) -> None:
    try:
        done = subprocess.run(
            [*command, msgspec.json.encode(setup).decode()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **worker_environment(role, setup.cores)},
        )
    finally:
        # No other process adopts the arenas of a replay.
        unlink_owned()
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["none"]
        raise PipelineError(f"The replay of {name} failed: run the profile again. Its last line: {lines[-1][:500]}")


WARM_UP_TOKENS = 16
"""Generated at each temperature before anything is measured."""
REPEATS = FEWEST_PROMPTS
"""Of each temperature in one pipeline."""
MOST_REPEATS = 2 * REPEATS
"""In all pipelines together, while the overlap efficiency is not known."""

OnProfileProgress = Callable[[str], None]
"""Called with the name of each step."""


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """What to profile."""

    prompt: str | Sequence[int]
    temperatures: tuple[float, ...]
    max_tokens: int
    seed: int
    settings: PipelineSettings

    def sampling(self, temperature: float, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, **UNFILTERED, seed=self.seed, max_tokens=tokens)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The figures, and the run that they come from."""

    profile: ProfileFigures
    run: TracedRun


def measure(task: ProfileTask, notice: OnProfileProgress = lambda _: None, most: int = MOST_REPEATS) -> MeasuredRun:
    """Raises InputError for what can't be profiled, PipelineError if a process fails. `most`: repeats after which the
    efficiency stays unknown."""
    repeats: list[list[RequestProfile]] = [[] for _ in task.temperatures]
    notes: dict[str, None] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            journal = task.settings.record or f"{folder}/events.jsonl"
            pipeline = Pipeline(settings=task.settings, trace=folder, record=journal)
            results = _generate(pipeline, task, notice)
            run = load(Path(folder))
            options = msgspec.structs.replace(task.settings.options, strategy=pipeline.strategy)
            expected = expected_rounds(list(replay(Path(journal))), options, len(results), pipeline.successors)
            alone: dict[str, WorkerLife] = {}
            for name, life in replays(run, Path(folder), task.settings.draft_command):
                notice(f"replayed {name} alone")
                if life is not None:
                    alone[name] = life
        notes |= dict.fromkeys(_notes(pipeline.note, run, alone, results))
        profiles = request_profiles(run, alone, [result.statistics for result in results])
        for place, profile in enumerate(profiles):
            repeats[place % len(repeats)].append(profile)
        requests = tuple(map(repeated, repeats))
        if len(repeats[0]) >= most or not any(request.undecided for request in requests):
            figures = ProfileFigures(
                strategy=pipeline.strategy,
                machine=(chip(), *(f"{life.worker.role}: {device_name(life.worker.device)}" for life in run.lives)),
                prompt_tokens=results[0].statistics.prompt_tokens,
                notes=tuple(notes),
                requests=requests,
                expected=expected,
            )
            return MeasuredRun(figures, run)


def _generate(pipeline: Pipeline, task: ProfileTask, notice: OnProfileProgress) -> list[Result]:
    """Warm up at every temperature, then measure every temperature in turn. A closed pipeline has written its trace."""
    notice("loading models")
    with pipeline:
        for temperature in task.temperatures:
            pipeline.generate(task.prompt, task.sampling(temperature, min(WARM_UP_TOKENS, task.max_tokens)))
        results = []
        for repeat, temperature in product(range(1, REPEATS + 1), task.temperatures):
            notice(f"generating at temperature {temperature:g}, {repeat} of {REPEATS}")
            results.append(pipeline.generate(task.prompt, task.sampling(temperature, task.max_tokens)))
    return results


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
    if any(result.statistics.pace is not None and not result.statistics.pace.valid for result in results):
        notes.append("Too many forwards overran the pace: this machine is too slow for the device, or too busy.")
    return notes
