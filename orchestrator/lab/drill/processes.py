"""A pipeline's processes seen from outside, and waiting for conditions. Knows no messages and no tokens."""

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from protocol.kv.segments import stale_segments
from protocol.paths import SEGMENTS_VARIABLE, sessions_folder

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
    folders = [str(folder) for folder in sessions_folder().glob("lp-*") if mark in str(folder)]
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


# A long drill's clients and looks at processes ----------------------------------------------------


class DrillClient(Protocol):
    """Sends one request after the other, until `ended` is set."""

    failures: list[str]
    ended: threading.Event

    def run(self) -> None: ...


@contextmanager
def at_work(clients: Sequence[DrillClient]) -> Iterator[None]:
    """Each client runs on a thread of its own. One that does not end within a minute has failed."""
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    yield
    for client in clients:
        client.ended.set()
    for client, thread in zip(clients, threads, strict=True):
        thread.join(60.0)
        client.failures += ["A client still waits for its answer."] if thread.is_alive() else []


def every(seconds: float, count: int) -> Iterator[int]:
    """The numbers below `count`, one each time that so many seconds have passed."""
    due = time.monotonic()
    for number in range(count):
        due += seconds
        time.sleep(max(0.0, due - time.monotonic()))
        yield number


def usages(pids: Mapping[str, int]) -> dict[str, Usage]:
    """What each of these processes that runs holds, by its name."""
    return {name: held for name, pid in pids.items() if (held := usage(pid)) is not None}


# Whether what they held grew ----------------------------------------------------------------------

_QUARTER = 0.25
_GROWTH = 1.1
_GROWTH_BYTES = 16 << 20
"""Memory is flat if the last quarter's median is at most a tenth and 16 MiB above the second quarter's."""

Sample = Mapping[str, Usage]
"""What each process held, by its name."""


def growth(names: Iterable[str], samples: Sequence[Sample]) -> list[str]:
    """A sentence for everything that grew from the second quarter to the last; the first quarter is the warm-up."""
    return [sentence for name in names for sentence in _growth(name, samples)]


def figures(names: Iterable[str], samples: Sequence[Sample]) -> dict[str, float]:
    """Median MiB, fewest descriptors and fewest threads of each process in the second and in the last quarter."""
    found: dict[str, float] = {}
    for name in names:
        for label, last in (("early", False), ("late", True)):
            part = _quarter(name, samples, last)
            if part:
                found[f"{name}_{label}_mib"] = round(_median([held.memory for held in part]) / (1 << 20), 1)
                found[f"{name}_{label}_descriptors"] = min(held.descriptors or 0 for held in part)
                found[f"{name}_{label}_threads"] = min(held.threads or 0 for held in part)
    return found


def levels(name: str, samples: Sequence[Sample]) -> str:
    """Memory, descriptors and threads of a process in the second and in the last quarter."""
    found = figures([name], samples)
    early, late = (
        " / ".join(f"{found.get(f'{name}_{label}_{what}', 0):.0f}" for what in ("mib", "descriptors", "threads"))
        for label in ("early", "late")
    )
    return f"{name} MiB / descriptors / threads {early} → {late}"


def _quarter(name: str, samples: Sequence[Sample], last: bool) -> list[Usage]:
    size = max(1, int(len(samples) * _QUARTER))
    part = samples[-size:] if last else samples[size : 2 * size]
    return [sample[name] for sample in part if name in sample]


def _growth(name: str, samples: Sequence[Sample]) -> list[str]:
    early, late = _quarter(name, samples, last=False), _quarter(name, samples, last=True)
    if not early or not late:
        return []
    before, after = _median([held.memory for held in early]), _median([held.memory for held in late])
    sentences: list[str] = []
    if after > _GROWTH * before + _GROWTH_BYTES:
        sentences.append(f"The memory of {name} grew from {before >> 20} to {after >> 20} MiB.")
    for what in ("descriptors", "threads"):
        first, final = ([getattr(held, what) or 0 for held in part] for part in (early, late))
        # Requests in progress hold some too, so the minimum of each quarter is compared.
        if min(final) > min(first) + 1:
            sentences.append(f"The {what} of {name} grew from {min(first)} to {min(final)}.")
    return sentences


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
