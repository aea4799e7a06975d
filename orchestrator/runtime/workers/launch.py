"""Starts one worker process, bound to this one: when either is gone, the other notices."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from protocol.messages.base import Role
from protocol.worker.process import WorkerSetup


def worker_command(role: Role) -> tuple[str, ...]:
    """The command line of our own worker of this role."""
    module = "draft_worker.prefill" if role == "prefill" else f"{role}_worker"
    return (sys.executable, "-m", module)


def launch(
    command: Sequence[str], setup: WorkerSetup, log: Path, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of a socket pair: end of file there means that it has ended. If we end, it does too."""
    ours, theirs = socket.socketpair()
    told = msgspec.structs.replace(setup, life=theirs.fileno())
    with theirs, log.open("wb") as output:
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
