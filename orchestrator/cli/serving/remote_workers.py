"""Options by which workers of other machines join a pipeline, and what its owner is told of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import click

from orchestrator.api.owner import Owner, attach_command
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.pipeline_options import Command, option
from orchestrator.cli.serving.discovery import announced
from orchestrator.machine.servers import KnownServer
from protocol.contracts.engines import TargetEngineName
from protocol.errors import InputError
from protocol.ineffective import SET, Ineffective
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation
from protocol.security.addresses import Endpoint
from protocol.security.keys import JoinLine

_ASKED = Ineffective("the pipeline that is asked has its workers already", running=SET)
_target_engine_option = option(
    "--target-engine",
    _ASKED,
    type=click.Choice(get_args(TargetEngineName)),
    default="mlx",
    show_default=True,
    help="none: wait for a target of another machine; --target then gives the tokenizer.",
)
_announce_option = option(
    "--announce",
    _ASKED,
    metavar="NAME",
    help="Be found under this name on the local network.",
)


def listening_options(command: Command, *, required: bool = False) -> Command:
    """--listen and --target-engine, which are fields of `PipelineSettings`, and --announce."""
    words = "Let workers of other machines in at HOST:PORT; port 0 picks one."
    listen = option(
        "--listen",
        _ASKED,
        metavar="HOST:PORT",
        required=required,
        help=words,
    )
    return listen(_target_engine_option(_announce_option(command)))


def require_listening(announce: str | None, settings: PipelineSettings) -> None:
    """Raises InputError if there is nothing to announce."""
    if announce and settings.listen is None:
        raise InputError("--announce says where workers may come: add --listen HOST:PORT.")


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
