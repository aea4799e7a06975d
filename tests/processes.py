"""Looks at a pipeline's processes from outside and waits for conditions. Knows no messages and no tokens."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator import Pipeline
from protocol.segment_registry import stale_segments

T = TypeVar("T")

_LOOK_SECONDS = 0.02
_PROGRAM = re.compile(
    r"-m (?:tests\.|draft_worker\.)?(orchestrator|target_worker|prefill_process|draft_worker|chaotic_draft)\b"
)


def until(condition: Callable[[], T | None], seconds: float = 30.0) -> T:
    """The first true value of `condition`; fails after `seconds` without one."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {seconds} s"
        time.sleep(_LOOK_SECONDS)
    return value


def mark(pipeline: Pipeline) -> str:
    """What the command lines of this pipeline's processes, and of no others, contain: its session folder."""
    return str(Path(pipeline.address.removeprefix("ipc://")).parent)


def members(mark: str) -> dict[str, int]:
    """Process ids of a pipeline's live processes by program, orchestrator included."""
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,command="], capture_output=True, text=True, check=True)
    found = {}
    for line in listing.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        program = _PROGRAM.search(command)
        if program and mark in command:
            found[program[1]] = int(pid)
    return found


def state(pid: int) -> str:
    """A process's state as `ps` abbreviates it, for instance T for stopped."""
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout


def remains(mark: str) -> list[str]:
    """Processes, folders and shared memory that a pipeline should not have left behind."""
    folders = [str(folder) for folder in Path("/tmp").glob("launch-pipeline-*/lp-*") if mark in str(folder)]
    return [*members(mark), *folders, *stale_segments()]
