"""`launch-pipeline start`, `serve-workers`, `stop` and `workers`: pipelines that keep running, and their workers."""

import functools
import json
from collections.abc import Iterable
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from orchestrator.api.owner import Owner, listening_pipelines, the_pipeline
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.help import BriefCommand, Group
from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import pipeline_options, without_effect
from orchestrator.cli.pipelines import first_models, print_notes, started
from orchestrator.cli.printing import print_whole
from orchestrator.cli.remote_workers import invited, listening_options
from orchestrator.cli.running_pipelines import keeps_running
from orchestrator.cli.sentences import say
from orchestrator.machine.network import require_unused
from orchestrator.machine.servers import host_port
from orchestrator.runtime.session import end_kept
from protocol.errors import InputError
from protocol.messages.remote import WorkerEntry
from protocol.security.addresses import endpoint
from protocol.shown_names import device_name, model_name

_address_option = click.option(
    "--address", default="tcp://127.0.0.1:5570", show_default=True, help="Where clients connect, on this machine."
)
_PID = click.option("--pid", type=int, help="Which pipeline, if several run: its process id.")


@click.command(cls=BriefCommand, brief="address listen pair target draft draft-engine strategy context")
@_address_option
@listening_options
@pipeline_options
@stays_awake
def start(address: str, settings: PipelineSettings) -> None:
    """Start a pipeline and keep it running for clients until Ctrl-C.

    \b
    launch-pipeline start --address tcp://127.0.0.1:5570
    launch-pipeline generate "import os" --address tcp://127.0.0.1:5570
    """
    _keep_running(address, settings)


@click.command(
    "serve-workers",
    cls=BriefCommand,
    brief="listen address pair target target-engine draft draft-engine context",
)
@_address_option
@functools.partial(listening_options, required=True)
@pipeline_options
@stays_awake
def serve_workers(address: str, settings: PipelineSettings) -> None:
    """Start a pipeline that workers of other machines may join, and print the line they join by.

    Everything between the machines is encrypted, and only machines that you invited get in.

    \b
    launch-pipeline serve-workers --listen 0.0.0.0:5571 --draft-engine none
    launch-pipeline attach draft JOIN-LINE                    on the other machine
    launch-pipeline workers list
    """
    _keep_running(address, settings)


@click.command()
def stop() -> None:
    """End the pipelines that `generate` has kept for the next command.

    One that `start` or `serve` runs ends by Ctrl-C there.

    \b
    launch-pipeline stop
    """
    kept = end_kept()
    busy = sum(session.folder.exists() for session in kept)
    say(f"Ended: {len(kept) - busy}." if kept else "No pipeline is kept.")
    print_notes(["One answers somebody, and ends after that." if busy else ""])


@click.group(cls=Group)
def workers() -> None:
    """Workers of a running pipeline, those of other machines among them."""


@workers.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.option("--pid", type=int, help="Only of the pipeline with this process id.")
def list_workers(as_json: bool, pid: int | None) -> None:
    """List the workers of every pipeline here that accepts remote workers.

    \b
    launch-pipeline workers list
    launch-pipeline workers list --json
    """
    chosen = listening_pipelines() if pid is None else {pid: the_pipeline(pid)}
    if not chosen:
        the_pipeline(None)
    found = {process: Owner(session).workers() for process, session in chosen.items()}
    if as_json:
        rows = [_row(process, entry) for process, entries in found.items() for entry in entries]
        click.echo(json.dumps(rows))
        return
    for process, entries in found.items():
        if len(found) > 1:
            click.echo(f"Pipeline {process}:")
        print_whole(workers_table(entries))


@workers.command()
@_PID
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def invite(pid: int | None, as_json: bool) -> None:
    """Print a new join line, good for one machine and ten minutes."""
    invitation = Owner(the_pipeline(pid)).invite()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(invitation)))
    else:
        click.echo(invitation.line)


@workers.command()
@click.argument("name")
@_PID
def revoke(name: str, pid: int | None) -> None:
    """Disconnect the machine NAME with all its workers; it needs a new join line to come back."""
    Owner(the_pipeline(pid)).revoke(name)
    say(f"{name} is gone. Requests go on without it.")


def _keep_running(address: str, settings: PipelineSettings) -> None:
    _require_unused(address, settings.listen)
    notes = without_effect(settings)
    settings, first = first_models(settings, asks=True)
    notes.append(first)
    with started(settings, notes, quiet=False, address=address, at_once=True) as pipeline:
        # The address ends its line, so that it can be copied as it is.
        click.echo(f"Ready at {pipeline.address}")
        say(f"Ctrl-C ends it. In Python: orchestrator.Client({pipeline.address!r})")
        if settings.listen is not None:
            invited(pipeline.owner, pipeline.state())
        keeps_running(pipeline, settings)
        pipeline.wait()


def _require_unused(address: str, listen: str | None) -> None:
    """Say which ports are taken, before models are loaded for them. Raises InputError for one that is in use."""
    own = endpoint(address, listening=True)
    if own is not None:
        require_unused(*own, "--address")
    if listen is None:
        return
    others = host_port(listen, listening=True)
    require_unused(*others, "--listen")
    if own is not None and own.port == others.port != 0:
        raise InputError(f"--address and --listen name the same port {own.port}: choose two.")
    print_notes(
        [f"Workers of other machines come to {listen} (--listen), clients of this one to {address} (--address)."]
    )


def _row(process: int, entry: WorkerEntry) -> dict[str, Any]:
    return {"pipeline": process, **msgspec.to_builtins(entry), "device": device_name(entry.device)}


def workers_table(entries: Iterable[WorkerEntry]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for title in ("name", "role", "state", "model", "device", "round trip"):
        table.add_column(title)
    for entry in entries:
        away = "" if entry.round_trip is None else f"{entry.round_trip * 1000:.2f} ms"
        name, device = model_name(entry.model), device_name(entry.device)
        model = f"{name} ({entry.engine})" if entry.engine else name
        table.add_row(*map(Text, (entry.name, entry.role or "", entry.status, model, device, away)))
    return table
