"""`launch-pipeline completion`: the completion script of a shell."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    eval "$(launch-pipeline completion zsh)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "launch-pipeline", "_LAUNCH_PIPELINE_COMPLETE").source())
