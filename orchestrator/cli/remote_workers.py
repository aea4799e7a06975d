"""How workers of other machines join a pipeline: options, and what its owner is told."""

from typing import get_args

import click

from orchestrator.api.owner import Owner, attach_command
from orchestrator.cli.pipeline_options import Command, option
from protocol.contracts.engines import TargetEngineName
from protocol.ineffective import SET, Ineffective
from protocol.messages.client import PipelineState

_ASKED = Ineffective("the pipeline that is asked has its workers already", running=SET)
_target_engine_option = option(
    "--target-engine",
    _ASKED,
    type=click.Choice(get_args(TargetEngineName)),
    default="mlx",
    show_default=True,
    help="none: wait for a target of another machine; --target then gives the tokenizer.",
)


def listening_options(command: Command, *, required: bool = False) -> Command:
    """--listen and --target-engine, which are fields of `PipelineSettings`."""
    words = "Let workers of other machines in at HOST:PORT; port 0 picks one."
    listen = option("--listen", _ASKED, metavar="HOST:PORT", required=required, help=words)
    return listen(_target_engine_option(command))


def invited(owner: Owner, state: PipelineState, *, err: bool = False) -> None:
    """Print how a worker joins. `state`: of the pipeline. `err`: on stderr."""
    invitation = owner.invite()
    click.echo(
        f"On the other machine, within {invitation.seconds / 60:.0f} minutes:\n\n"
        f"  {attach_command(invitation, state)}\n\n"
        "Another line: launch-pipeline workers invite\nWho is there: launch-pipeline workers list",
        err=err,
    )
