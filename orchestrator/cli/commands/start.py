"""`launch-pipeline start` and `serve-workers`: a pipeline that runs until Ctrl-C, for clients and remote workers."""

from contextlib import ExitStack
from typing import Any

import click

from orchestrator.cli.commands.workers import welcome
from orchestrator.cli.options import pipeline_options, target_engine_option, without_effect
from orchestrator.cli.pipelines import started
from orchestrator.machine.known_servers import KnownServer
from orchestrator.tools.attach.discovery import announced
from protocol.errors import InputError
from protocol.security.addresses import Endpoint
from protocol.security.keys import JoinLine

_HOST_PORT = "Let workers of other machines in at HOST:PORT; port 0 picks one."
_address_option = click.option(
    "--address", default="tcp://127.0.0.1:5570", show_default=True, help="Where clients connect, on this machine."
)
_announce_option = click.option("--announce", metavar="NAME", help="Be found under this name on the local network.")


@click.command()
@_address_option
@click.option("--listen", metavar="HOST:PORT", help=_HOST_PORT)
@target_engine_option
@_announce_option
@pipeline_options
def start(**options: Any) -> None:
    """Start a pipeline and keep it running for clients until Ctrl-C.

    \b
    launch-pipeline start --address tcp://127.0.0.1:5570
    launch-pipeline generate "import os" --address tcp://127.0.0.1:5570
    """
    _keep_running(options)


@click.command("serve-workers")
@_address_option
@click.option("--listen", metavar="HOST:PORT", required=True, help=_HOST_PORT)
@target_engine_option
@_announce_option
@pipeline_options
def serve_workers(**options: Any) -> None:
    """Start a pipeline that workers of other machines may join, and print the line they join by.

    Everything between the machines is encrypted, and only machines that you invited get in.

    \b
    launch-pipeline serve-workers --listen 0.0.0.0:5571 --draft-engine none
    launch-pipeline attach draft JOIN-LINE                    on the other machine
    launch-pipeline workers list
    """
    _keep_running(options)


def _keep_running(options: dict[str, Any]) -> None:
    announce, listens = options.pop("announce"), options["listen"] is not None
    if announce and not listens:
        raise InputError("--announce says where workers may come: add --listen HOST:PORT.")
    with started(options, without_effect(options), quiet=False) as pipeline, ExitStack() as stack:
        # The address ends its line, so that it can be copied as it is.
        click.echo(f"Ready at {pipeline.address}")
        click.echo(f"Ctrl-C ends it. In Python: orchestrator.Client({pipeline.address!r})")
        if listens:
            invitation = pipeline.owner.invite()
            click.echo(welcome(invitation))
            line = JoinLine.parse(invitation.line)
            if announce:
                stack.enter_context(announced(announce, KnownServer(Endpoint(line.host, line.port), line.server)))
        pipeline.wait()
