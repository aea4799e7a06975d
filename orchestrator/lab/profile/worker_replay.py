"""Replays each worker of a traced run alone: the times without overlap."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from orchestrator.lab.profile.run import TracedRun, WorkerLife, load_life
from orchestrator.machine.hardware import worker_environment
from protocol.errors import PipelineError
from protocol.kv.segments import unlink_owned
from protocol.messages.base import Role
from protocol.own_modules import module_command
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
