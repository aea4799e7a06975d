"""The ranks of a sharded target as processes, from start to end. Knows no tokens."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from protocol.contracts.model_fingerprint import model_fingerprint
from protocol.contracts.target_hosts import RankSetup, TargetHosts, require_divisible
from protocol.errors import PipelineError
from protocol.inference.tree_model import TreeModel
from target_worker.tensor_parallel.group import connect, divided
from target_worker.tensor_parallel.heartbeat import start_heartbeat
from target_worker.tensor_parallel.rank_commands import RankCommand, received
from target_worker.tensor_parallel.rendezvous import Peer, join, meet
from target_worker.tensor_parallel.sharded_model import LeadingModel, follow


def leading(folder: Path, hosts: TargetHosts) -> LeadingModel:
    """Rank 0's share of the model, with all other ranks at its command; those of this machine are started.

    Raises InputError for a model that can't be divided and for hosts that can't meet. Ends the process if a rank
    is lost, now or later: MLX can't replace one, so all of them start anew.
    """
    require_divisible(folder, hosts.ranks)
    children = [_started(RankSetup(hosts=hosts, rank=rank, model=str(folder))) for rank in _local_ranks(hosts)]
    peers = meet(hosts, model_fingerprint(folder), lambda: _require_alive(children))
    for peer in peers:
        start_heartbeat(peer.pulse, hosts.silence, _end_because(f"Rank {peer.rank} ({hosts.addresses[peer.rank][0]})"))
    with _together():
        model = LeadingModel.load(folder, divided(connect(hosts, 0)))
    model.lead(peers)
    return model


def serve_rank(setup: RankSetup, ready: Callable[[], None], say: Callable[[str], None]) -> None:
    """Another rank's life: wait for rank 0, load this rank's share, do as told. Ends with rank 0, by EOFError.

    `ready` is called when the model is loaded. Raises InputError if the ranks don't belong together.
    """
    hosts, folder = setup.hosts, Path(setup.model)
    require_divisible(folder, hosts.ranks)
    say(f"waiting for rank 0 at {hosts.addresses[0][0]}")
    peer = join(hosts, setup.rank, model_fingerprint(folder))
    start_heartbeat(peer.pulse, hosts.silence, _end_because("Rank 0"))
    say("loading")
    with _together():
        model = TreeModel.load(folder, divided(connect(hosts, setup.rank)))
    ready()
    say("at work")
    follow(model, _calls(peer))


def _calls(peer: Peer) -> Iterator[RankCommand]:
    while True:
        yield received(peer.calls)


def _local_ranks(hosts: TargetHosts) -> range:
    return range(1, hosts.ranks) if hosts.local else range(0)


def _started(setup: RankSetup) -> subprocess.Popen[bytes]:
    """A rank as a child, in our process group, on our cores, with our log. It ends when this process does."""
    ours, theirs = socket.socketpair()
    _LIVES.append(ours)
    with theirs:
        setup = msgspec.structs.replace(setup, life=theirs.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", "target_worker.tensor_parallel.rank_process", msgspec.json.encode(setup).decode()],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )


_LIVES: list[socket.socket] = []
"""Our ends of the children's life sockets: open for as long as this process lives."""


def _require_alive(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank, child in enumerate(children, start=1):
        if child.poll() is not None:
            raise PipelineError(f"Rank {rank} of the target ended with exit code {child.returncode} before it began.")


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """A collective that fails while a model loads is the loss of a rank, not the model's fault."""
    try:
        yield
    except RuntimeError as error:
        _end_because("Another rank")(f"was lost ({error})")


def _end_because(who: str) -> Callable[[str], None]:
    """Ends this process from any thread, whatever the others are blocked in."""

    def end(what: str) -> None:
        sys.stderr.write(f"{who} {what}: all ranks start anew.\n")
        sys.stderr.flush()
        os._exit(1)

    return end
