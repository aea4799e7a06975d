"""`launch-pipeline attach` and `target-rank`: a worker of this machine for a pipeline on another machine."""

import os
import re
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import (
    draft_engine_option,
    kv_bits_option,
    option,
    setting,
    speculation_option,
    without_effect,
)
from orchestrator.cli.pipelines import ConversionBar, print_notes, target_folder
from orchestrator.core.options import FIXED_PREFIX_CACHE, MemoryMib
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.drafts.draft_choice import draft_choice
from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.servers import KnownServer, known_server
from orchestrator.machine.target import checked_hosts
from protocol.child_process import module_command
from protocol.contracts.engines import DraftEngineName
from protocol.contracts.model_folder import KvBits
from protocol.contracts.target_hosts import RankSetup
from protocol.errors import InputError
from protocol.ineffective import Ineffective
from protocol.messages.base import Role
from protocol.paths import keys_folder
from protocol.security.addresses import Endpoint
from protocol.security.keys import JoinLine

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_ADDRESS = re.compile(r"(?:tcp://)?\S+:\d+")
_REFUSED = 2
"""Exit code of a rank that would fail again."""
_PAUSE_SECONDS = 0.5
_NO_DRAFT_LENT = Ineffective("no draft is lent", role=("target", "prefill"))


@click.command()
@click.argument("role", type=click.Choice(["draft", "target", "prefill"]))
@click.argument("server", metavar="JOIN-LINE|HOST:PORT")
@setting(
    "--draft",
    _NO_DRAFT_LENT,
    metavar="MODEL",
    help="Folder or Hugging Face id of the draft. Default: the default target's.",
)
@option(
    "--target",
    Ineffective(
        "the default target's own draft is lent; a trained drafter would need its target's name",
        role="draft",
        draft=None,
    ),
    metavar="MODEL",
    help="The same for a target, or for a trained drafter's. Default: the default target.",
)
@draft_engine_option(
    _NO_DRAFT_LENT,
    automatic="coreml for a folder that `convert` made, otherwise mlx",
)
@kv_bits_option(Ineffective("a draft holds its keys and values as they are", role="draft"))
@speculation_option("prefix_cache_memory", Ineffective("a prefill worker hands over all KV", role="prefill"))
@click.option("--name", help="Name of this machine in the other's lists.  [default: its host name]")
@stays_awake
def attach(
    role: Role,
    server: str,
    draft: str | None,
    target: str | None,
    draft_engine: DraftEngineName,
    kv_bits: KvBits,
    prefix_cache_memory: MemoryMib | None,
    name: str | None,
) -> None:
    """Lend a worker of this machine to a pipeline on another one, until Ctrl-C.

    The other machine runs `launch-pipeline serve-workers --listen HOST:PORT`, which prints the join line. It is good
    for one machine and ten minutes; from then on HOST:PORT is enough.

    \b
    launch-pipeline attach draft lp1:mac-studio.local:5571:...
    launch-pipeline attach draft mac-studio.local:5571 --draft-engine coreml
    launch-pipeline attach prefill mac-studio.local:5571 --target MODEL
    """
    # It imports the workers' loop and with it numpy, which takes a moment.
    from orchestrator.cli.attachment import Attachment, Lending, lent_worker

    print_notes(without_effect())
    folder = keys_folder()
    line = JoinLine.parse(server) if server.startswith("lp1:") else None
    known = _server(folder, server, line)
    lent = (
        _draft(draft_engine, draft, target)
        if role == "draft"
        else {"engine": "mlx", "model": str(target_folder(target))}
    )
    cache = prefix_cache_memory if isinstance(prefix_cache_memory, int) else FIXED_PREFIX_CACHE
    worker = lent_worker(known, folder, **lent, kv_bits=kv_bits, prefix_cache=cache)
    lending = Lending(role, known, _checked(name), folder, worker, line)
    console = Console(stderr=True)
    with console.status("Connecting ...") as status:
        note = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        attachment = Attachment(lending, _shown(console, status.update), note)
        attachment.run()


@click.command("target-rank")
@click.option("--hosts", "file", metavar="FILE", required=True, help="The hosts file, the same on every host.")
@click.option("--rank", type=click.IntRange(min=1), required=True, help="Which of its hosts this is; the first is 0.")
@click.option("--target", metavar="MODEL", help="The same as at rank 0. Default: the default target.")
@kv_bits_option()
@stays_awake
def target_rank(file: str, rank: int, target: str | None, kv_bits: KvBits) -> None:
    """Serve a target that is bigger than one machine, as one of its ranks, until Ctrl-C.

    Rank 0 is the pipeline itself. The ranks know one another by the key in the hosts file. The wire between them
    must still be one that you trust: MLX does not encrypt what goes over it.

    \b
    launch-pipeline start --target-hosts hosts.json --target MODEL
    launch-pipeline target-rank --hosts hosts.json --rank 1 --target MODEL
    """
    folder = target_folder(target)
    hosts = checked_hosts(file, folder)
    if rank >= hosts.ranks:
        raise InputError(f"The hosts file {file} has no rank {rank}: choose 1 to {hosts.ranks - 1}.")
    while _lived(RankSetup(hosts=hosts, rank=rank, model=str(folder), kv_bits=kv_bits)) != _REFUSED:
        time.sleep(_PAUSE_SECONDS)
    raise InputError(f"Rank {rank} can't serve: see the reason above.")


def _server(folder: Path, text: str, line: JoinLine | None) -> KnownServer:
    """The server, whose key is in the join line or was saved before."""
    if line is None and not _ADDRESS.fullmatch(text):
        raise InputError(
            f"{text!r} is neither a join line (lp1:HOST:PORT:...), which `launch-pipeline workers invite` prints on "
            "the other machine, nor HOST:PORT of a pipeline that this machine has joined before."
        )
    return known_server(folder, text) if line is None else KnownServer(Endpoint(line.host, line.port), line.server)


def _draft(engine: DraftEngineName, draft: str | None, target: str | None) -> dict[str, str]:
    """Engine and models, as in `WorkerSetup`."""
    with ConversionBar(False) as bar:
        choice = draft_choice(engine, draft, bar, None if target is None else resolve(target, "target", bar))
    print_notes([choice.note])
    return {"engine": choice.engine, "model": str(choice.folder or ""), "target": str(choice.target or "")}


def _checked(name: str | None) -> str:
    if name is not None and not _NAME.fullmatch(name):
        raise InputError(
            f"--name {name[:100]} has other characters than letters, digits, '.', '_' and '-': choose one."
        )
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip("-._")[:48]
    return name or plain or "guest"


def _shown(console: Console, update: Any) -> Any:
    """What shows the state: on a terminal a line in place, elsewhere a new line for each change."""
    last = ""

    def show(line: str) -> None:
        nonlocal last
        if console.is_terminal:
            update(line)
        elif _kind(line) != _kind(last):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        last = line

    return show


def _kind(line: str) -> str:
    """The line without its numbers, which change all the time."""
    return re.sub(r"[0-9.]+", "", line)


def _lived(setup: RankSetup) -> int:
    """Run the rank until it ends; its exit code."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            setup = msgspec.structs.replace(setup, parent_socket=theirs.fileno())
            process = subprocess.Popen(
                [
                    *module_command("target_worker.tensor_parallel.rank_process"),
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
