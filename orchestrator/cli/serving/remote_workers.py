"""Options by which workers of other machines join a pipeline, and what its owner is told of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import click

from orchestrator.api.owner import Owner, attach_command
from orchestrator.cli.options import Command
from orchestrator.cli.serving.discovery import announced
from orchestrator.machine.known_servers import KnownServer
from protocol.contracts.engines import TargetEngineName
from protocol.errors import InputError
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation
from protocol.security.addresses import Endpoint
from protocol.security.keys import JoinLine

target_engine_option = click.option(
    "--target-engine",
    type=click.Choice(get_args(TargetEngineName)),
    default="mlx",
    show_default=True,
    help="none: wait for a target of another machine; --target then gives the tokenizer.",
)
_announce_option = click.option("--announce", metavar="NAME", help="Be found under this name on the local network.")


def listening_options(command: Command, *, required: bool = False) -> Command:
    """--listen, --announce and --target-engine; the command gets them as keywords."""
    words = "Let workers of other machines in at HOST:PORT; port 0 picks one."
    listen = click.option("--listen", metavar="HOST:PORT", required=required, help=words)
    return listen(target_engine_option(_announce_option(command)))


def announcement(options: dict[str, Any]) -> str | None:
    """Takes --announce out of `options`. Raises InputError if there is nothing to announce."""
    name = options.pop("announce")
    if name and options["listen"] is None:
        raise InputError("--announce says where workers may come: add --listen HOST:PORT.")
    return name


@contextmanager
def invited(owner: Owner, state: PipelineState, name: str | None, *, err: bool = False) -> Iterator[None]:
    """Print how a worker joins, and announce the address as `name` meanwhile. `state`: of the pipeline. `err`: on
    stderr."""
    invitation = owner.invite()
    click.echo(_welcome(invitation, state), err=err)
    line = JoinLine.parse(invitation.line)
    if name is None:
        yield
        return
    with announced(name, KnownServer(Endpoint(line.host, line.port), line.server)):
        yield


def _welcome(invitation: Invitation, state: PipelineState) -> str:
    """How workers of other machines join, for the owner of a new pipeline."""
    return (
        f"On the other machine, within {invitation.seconds / 60:.0f} minutes:\n\n"
        f"  {attach_command(invitation, state)}\n\n"
        "Another line: launch-pipeline workers invite\nWho is there: launch-pipeline workers list"
    )
