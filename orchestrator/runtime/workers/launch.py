"""Starts one worker process, with a socket pair by which each process notices the other's end."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from protocol.child_process import module_command
from protocol.messages.base import Role
from protocol.worker.process import WorkerSetup


def worker_command(role: Role) -> tuple[str, ...]:
    """The command line of our own worker of this role."""
    module = "draft_worker.prefill" if role == "prefill" else f"{role}_worker"
    return module_command(module)


def launch(
    command: Sequence[str], setup: WorkerSetup, log: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of a socket pair. The end reads end of file when the worker ends, and vice versa."""
    ours, theirs = socket.socketpair()
    complete = msgspec.structs.replace(setup, life=theirs.fileno())
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            [*command, msgspec.json.encode(complete).decode()],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    return process, ours
