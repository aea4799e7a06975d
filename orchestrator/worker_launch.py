"""Starts one worker process, bound to this one: when either is gone, the other notices."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from protocol.messages import Role
from protocol.worker_process import WorkerSetup


def worker_command(role: Role) -> tuple[str, ...]:
    """The command line of our own worker of this role."""
    module = "draft_worker.prefill_process" if role == "prefill" else f"{role}_worker"
    return (sys.executable, "-m", module)


def launch(
    command: Sequence[str], setup: WorkerSetup, log: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of a socket pair: end of file there means that it has ended. If we end, it does too."""
    ours, theirs = socket.socketpair()
    told = msgspec.structs.replace(setup, life=theirs.fileno())
    with theirs, log.open("wb") as output, _staying_on(setup.cores):
        process = subprocess.Popen(
            [*command, msgspec.json.encode(told).decode()],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    return process, ours


@contextmanager
def _staying_on(cores: Sequence[int]) -> Iterator[None]:
    """A process that is started within stays on `cores` from the first, where the OS allows: one that loads again
    must not get in the way of those at work."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
