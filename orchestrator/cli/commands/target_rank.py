"""`launch-pipeline target-rank`: runs one rank of a divided target, and starts it again when it ends."""

import os
import socket
import subprocess
import sys
import time

import click
import msgspec

from orchestrator.cli.pipelines import target_folder
from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.target_hosts import checked_hosts
from protocol.contracts.target_hosts import RankSetup
from protocol.errors import InputError

_REFUSED = 2
"""Exit code of a rank that would fail again."""
_PAUSE_SECONDS = 0.5


@click.command("target-rank")
@click.option("--hosts", "file", metavar="FILE", required=True, help="The hosts file, the same on every host.")
@click.option("--rank", type=click.IntRange(min=1), required=True, help="Which of its hosts this is; the first is 0.")
@click.option("--target", metavar="MODEL", help="The same as at rank 0. Default: the default target.")
def target_rank(file: str, rank: int, target: str | None) -> None:
    """Serve a target that is bigger than one machine, as one of its ranks, until Ctrl-C.

    Rank 0 is the pipeline itself. The wire between the ranks must be one that you trust: MLX neither
    authenticates nor encrypts what goes over it.

    \b
    launch-pipeline start --target-hosts hosts.json --target MODEL              on the first host
    launch-pipeline target-rank --hosts hosts.json --rank 1 --target MODEL      on the second
    """
    folder = target_folder(target, quiet=False)
    hosts = checked_hosts(file, folder)
    if rank >= hosts.ranks:
        raise InputError(f"The hosts file {file} has no rank {rank}: choose 1 to {hosts.ranks - 1}.")
    while _lived(RankSetup(hosts=hosts, rank=rank, model=str(folder))) != _REFUSED:
        time.sleep(_PAUSE_SECONDS)
    raise InputError(f"Rank {rank} can't serve: see the reason above.")


def _lived(setup: RankSetup) -> int:
    """Run the rank until it ends; its exit code."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            setup = msgspec.structs.replace(setup, life=theirs.fileno())
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "target_worker.tensor_parallel.rank_process",
                    msgspec.json.encode(setup).decode(),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **worker_environment("target", ())},
            )
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()
