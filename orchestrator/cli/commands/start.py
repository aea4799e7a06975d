"""`launch-pipeline start` and `serve-workers`: a pipeline that stays, with workers of other machines or without."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click

from orchestrator.api.pipeline import Pipeline
from orchestrator.cli.commands.workers import welcome
from orchestrator.machine.known_servers import KnownServer
from orchestrator.tools.attach.discovery import announced
from protocol.errors import InputError
from protocol.security.addresses import Endpoint
from protocol.security.keys import JoinLine

_ADDRESS = click.option(
    "--address", default="tcp://127.0.0.1:5570", show_default=True, help="Where clients connect, on this machine."
)
_TARGET_ENGINE = click.option(
    "--target-engine",
    type=click.Choice(["mlx", "none"]),
    default="mlx",
    show_default=True,
    help="none: a target of another machine is waited for; --target then gives the tokenizer.",
)
_ANNOUNCE = click.option("--announce", metavar="NAME", help="Be found under this name on the local network.")
_HOST_PORT = "Let workers of other machines in at HOST:PORT; port 0 picks one."

Starter = Callable[..., Any]


def serve_commands(pipeline_options: Starter, started: Starter) -> list[click.Command]:
    """`started` makes the context of a pipeline from its options."""

    @click.command()
    @_ADDRESS
    @click.option("--listen", metavar="HOST:PORT", help=_HOST_PORT)
    @_TARGET_ENGINE
    @_ANNOUNCE
    @pipeline_options
    def start(**options: Any) -> None:
        """Start a pipeline and keep it running for clients until Ctrl-C.

        \b
        launch-pipeline start --address tcp://127.0.0.1:5570
        launch-pipeline generate "import os" --address tcp://127.0.0.1:5570
        """
        _serve(started, options)

    @click.command("serve-workers")
    @_ADDRESS
    @click.option("--listen", metavar="HOST:PORT", required=True, help=_HOST_PORT)
    @_TARGET_ENGINE
    @_ANNOUNCE
    @pipeline_options
    def serve_workers(**options: Any) -> None:
        """Start a pipeline that workers of other machines may join, and print the line they join by.

        Everything between the machines is encrypted, and only machines that you invited get in.

        \b
        launch-pipeline serve-workers --listen 0.0.0.0:5571 --draft-engine none
        launch-pipeline attach draft JOIN-LINE                    on the other machine
        launch-pipeline workers list
        """
        _serve(started, options)

    return [start, serve_workers]


def _serve(started: Starter, options: dict[str, Any]) -> None:
    announce = options.pop("announce")
    listens = options["listen"] is not None
    if announce and not listens:
        raise InputError("--announce says where workers may come: add --listen HOST:PORT.")
    with started(options, quiet=False) as pipeline:
        assert isinstance(pipeline, Pipeline)
        address = pipeline.address
        click.echo(f"Ready at {address}. In Python: orchestrator.Client({address!r}). Ctrl-C ends it.")
        with ExitStack() as stack:
            if listens:
                invitation = pipeline.owner.invite()
                click.echo(welcome(invitation))
                line = JoinLine.parse(invitation.line)
                if announce:
                    stack.enter_context(announced(announce, KnownServer(Endpoint(line.host, line.port), line.server)))
            pipeline.wait()
