"""A pipeline's processes seen from outside, and waiting for conditions. Knows no messages and no tokens."""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from orchestrator.runtime.session import sessions_home
from protocol.kv.segments import stale_segments
from protocol.paths import SEGMENTS_VARIABLE

T = TypeVar("T")

_POLL_SECONDS = 0.02
_PROGRAM = re.compile(
    r"-m (?:tests\.support\.|orchestrator\.lab\.drill\.)?"
    r"(orchestrator|target_worker|draft_worker\.prefill|draft_worker|chaotic_draft|feature_draft|faulty_draft)(?![.\w])"
)
_PROCESSES = Path("/proc")


class Usage(NamedTuple):
    """Resources of a process. Without /proc (macOS) only its memory is known."""

    memory: int
    """Resident bytes."""
    descriptors: int | None
    threads: int | None


def until(condition: Callable[[], T | None], seconds: float = 30.0) -> T:
    """The first true value of `condition`; TimeoutError after `seconds` without one."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {value!r} after {seconds} s")
        time.sleep(_POLL_SECONDS)
    return value


def mark(address: str) -> str:
    """The session folder of a pipeline: only the command lines of its processes contain it."""
    return str(Path(address.removeprefix("ipc://")).parent)


def members(mark: str) -> dict[str, int]:
    """Process ids of a pipeline's live processes by program, orchestrator included."""
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,command="], capture_output=True, text=True, check=True)
    found: dict[str, int] = {}
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
    """Processes, folders and shared memory that a pipeline left behind."""
    folders = [str(folder) for folder in sessions_home().glob("lp-*") if mark in str(folder)]
    return [*members(mark), *folders, *stale_segments()]


def usage(pid: int) -> Usage | None:
    """Resources of process `pid`; None if it has ended."""
    with suppress(OSError, ValueError):
        if not _PROCESSES.is_dir():
            rss = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
            return Usage(int(rss.stdout) << 10, None, None)
        folder = _PROCESSES / str(pid)
        pages = int((folder / "statm").read_text().split()[1])
        descriptors = len(list((folder / "fd").iterdir()))
        return Usage(pages * os.sysconf("SC_PAGE_SIZE"), descriptors, len(list((folder / "task").iterdir())))
    return None


@contextmanager
def own_registry() -> Iterator[Path]:
    """Within the context, this process and its children register shared memory in a folder of their own.

    So other pipelines of this user neither remove the segments that a drill leaves nor add to them.
    """
    before = os.environ.get(SEGMENTS_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        os.environ[SEGMENTS_VARIABLE] = str(Path(folder) / "segments")
        try:
            yield Path(folder) / "segments"
        finally:
            del os.environ[SEGMENTS_VARIABLE]
            if before is not None:
                os.environ[SEGMENTS_VARIABLE] = before
