"""A pipeline's processes seen from outside, signals to them, code and ports for them, and waiting for conditions."""

import os
import re
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

import msgspec
import pytest

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.core.events import Arrived
from orchestrator.runtime.recording import replay
from protocol.kv.segments import stale_segments
from protocol.messages.base import Role
from protocol.paths import sessions_folder

T = TypeVar("T")

_POLL_SECONDS = 0.02
_PROGRAM = re.compile(
    r"-m (?:tests\.support\.)?"
    r"(orchestrator|target_worker|draft_worker\.prefill|draft_worker|chaotic_draft)(?![.\w])"
)


def until(condition: Callable[[], T | None], seconds: float = 30.0) -> T:
    """The first true value of `condition`; TimeoutError after `seconds` without one. A look counts as a second at most,
    so that no wait ends because this process was halted."""
    waited, last = 0.0, time.monotonic()
    while not (value := condition()):
        if waited > seconds:
            raise TimeoutError(f"still {value!r} after {seconds} s")
        time.sleep(_POLL_SECONDS)
        waited, last = waited + min(1.0, (now := time.monotonic()) - last), now
    return value


def free_ports(count: int) -> list[int]:
    """Free ports of those that no system gives away by itself: others would take them meanwhile."""
    found: list[int] = []
    for port in SystemRandom().sample(range(20_000, 32_000), 1_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("all ports are taken")


def running() -> list[tuple[int, int, str]]:
    """Of all processes of this machine: the id, the parent's id, and the command line."""
    words = ["ps", "-A", "-ww", "-o", "pid=,ppid=,command="]
    listing = subprocess.run(words, capture_output=True, text=True, check=True)
    rows = ([*line.split(None, 2), ""] for line in listing.stdout.splitlines())
    return [(int(pid), int(parent), command) for pid, parent, command, *_ in rows]


def members(mark: str) -> dict[str, int]:
    """Process ids of a pipeline's live processes by program, orchestrator included."""
    processes = [each for each in running() if mark in each[2]]
    commands = {pid: command for pid, _, command in processes}
    found: dict[str, int] = {}
    for pid, parent, command in processes:
        # Until a process runs its own program it shows that of the one that starts it.
        if (program := _PROGRAM.search(command)) and commands.get(parent) != command:
            found[program[1]] = pid
    return found


def state(pid: int) -> str:
    """A process's state as `ps` abbreviates it, for instance T for stopped."""
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout


def remains(mark: str) -> list[str]:
    """Processes, folders and shared memory that a pipeline left behind."""
    folders = [str(folder) for folder in sessions_folder().glob("lp-*") if mark in str(folder)]
    return [*members(mark), *folders, *stale_segments()]


def mark(pipeline: Pipeline) -> str:
    """What the command lines of this pipeline's processes, and of no others, contain: its session folder."""
    return str(Path(pipeline.address.removeprefix("ipc://")).parent)


def shoot(pipeline: Pipeline, program: str, kind: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a process of the pipeline, once it is there; its process id."""
    pid = until(lambda: members(mark(pipeline)).get(program))
    os.kill(pid, kind)
    return pid


def generate_while(
    pipeline: Pipeline, prompt: str | Sequence[int], params: SamplingParams, after: int, happens: Callable[[], object]
) -> Result:
    """The result of a request during which, behind so many pieces of text, something happens."""
    with pipeline.stream(prompt, params) as stream:
        for count, _ in enumerate(stream):
            if count == after:
                happens()
        assert stream.result is not None
        return stream.result


def inject(patch: pytest.MonkeyPatch, folder: Path, program: str, code: str) -> None:
    """Processes that start from now on with the module `program` run this code first. `folder` holds it."""
    own = f"import sys\n\nif {program!r} in sys.orig_argv:\n{textwrap.indent(code, '    ')}"
    (folder / "sitecustomize.py").write_text(own)
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")])))


def started_with(variable: str) -> list[str]:
    """Lines of `ps` of all other processes with this variable (`NAME=value`) in their environment, also of those whose
    parents are gone."""
    command, without = ["ps", "axewwo", "pid=,args="], {variable.partition("=")[0]: ""}
    listing = subprocess.run(command, env={**os.environ, **without}, capture_output=True, text=True, check=True)
    lines = [line.strip() for line in listing.stdout.splitlines() if f" {variable} " in f"{line} "]
    return [line for line in lines if int(line.split(maxsplit=1)[0]) != os.getpid()]


def of_worker(journal: Path, kind: type[T], role: Role = "draft") -> list[T]:
    """Of a pipeline that is recorded there: a worker's messages of a kind so far, in order."""
    said: list[T] = []
    # The last line may be half written.
    with suppress(msgspec.DecodeError):
        for event, _ in replay(journal):
            if isinstance(event, Arrived) and event.role == role and isinstance(event.message, kind):
                said.append(event.message)
    return said
