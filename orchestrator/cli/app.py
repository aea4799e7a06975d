"""The command line: its commands, its settings, and what becomes of errors. Only the command line prints."""

import importlib
import signal
import sys
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import click

from orchestrator.api.client import NoPipeline
from orchestrator.api.validation import IneffectiveOption
from orchestrator.cli.configuration import default_map, origin, read_environment
from orchestrator.cli.help import Group
from orchestrator.cli.sentences import say
from protocol.errors import InputError, PipelineError
from protocol.paths import config_file

_INTERRUPTED = 130
_FAILED = 1
_SECTIONS = {
    "Talk": {
        "chat": "chat:chat",
        "generate": "generate:generate",
        "launch": "launch.command:launch",
    },
    "Serve": {
        "serve": "serve:serve",
        "service": "service.command:service",
        "start": "start:start",
        "stop": "start:stop",
        "cache": "cache:cache",
    },
    "Models and settings": {
        "pairs": "pairs:pairs_command",
        "doctor": "doctor:doctor",
        "convert": "convert:convert",
        "train-draft": "train_draft:train_draft",
        "config": "config:config",
        "completion": "config:completion",
    },
    "Several machines": {
        "serve-workers": "start:serve_workers",
        "attach": "attach:attach",
        "workers": "start:workers",
        "target-rank": "attach:target_rank",
    },
    "Laboratory": {
        "bench": "measurements.bench:bench",
        "profile": "measurements.profile:profile",
        "plan": "plan:plan",
        "calibrate": "measurements.calibrate:calibrate",
        "first-light": "measurements.first_light:first_light",
    },
}
"""The commands by their use, and where each one is, below `orchestrator.cli.commands`."""


class CommandTable(UserDict[str, Any]):
    """Commands, or their places. A command is imported when it is asked for: all together take half a second."""

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(place := self.data[name], str):
            module, attribute = place.split(":")
            command = getattr(importlib.import_module(f"orchestrator.cli.commands.{module}"), attribute)
            read_environment(command, (name,))
            self.data[name] = command
        return self.data[name]


class Commands(Group):
    """Errors of the Python API get a hint at the command line's own help here, and nowhere else."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # click's parser does not say whose option lacks a value.
            if error.ctx is None and (name := ctx.invoked_subcommand):
                error.ctx = click.Context(self.commands[name], ctx, name)
            raise
        except NoPipeline as error:
            hint = f"start one with `launch-pipeline start --address {error.address}`"
            raise PipelineError(f"No pipeline answers at {error.address}: {hint}.") from error


@click.group(
    cls=Commands,
    commands=CommandTable({name: place for section in _SECTIONS.values() for name, place in section.items()}),
    sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(None, "-V", "--version", package_name="launch-pipeline")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="LAUNCH_PIPELINE_CONFIG",
    help="Settings in TOML.  [default: ~/.config/launch-pipeline/config.toml]",
)
@click.pass_context
def cli(context: click.Context, file: Path | None) -> None:
    """Speculative decoding with draft and target at work at the same time, in separate processes.

    A small draft model guesses ahead while a big target model checks its guesses; what comes out is
    token for token what the target alone would say, only sooner.

    \b
    launch-pipeline generate "Why is the sky blue?"   with a small chat model
    launch-pipeline doctor                            what this machine has
    """
    chosen = file or (config_file() if config_file().is_file() else None)
    if chosen is not None:
        context.meta["configuration"] = chosen
        context.default_map = default_map(cli, chosen)


def main() -> None:
    """The installed command: each failure is one sentence on stderr and an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Each command tells it itself, with the names of flags.
    warnings.simplefilter("ignore", IneffectiveOption)
    try:
        cli.main(prog_name="launch-pipeline", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        say(f"Error: {_usage(error)}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(_INTERRUPTED)
    except PipelineError as error:
        say(f"Error: {error}", err=True)
        sys.exit(2 if isinstance(error, InputError) else _FAILED)
    except BrokenPipeError:
        # The reader of our output has ended; stderr may have had the same reader.
        sys.stderr.close()
        sys.exit(_FAILED)


def _usage(error: click.ClickException) -> str:
    """One line: what is wrong, and which help says more."""
    context = getattr(error, "ctx", None)
    command = context.command_path if isinstance(context, click.Context) else "launch-pipeline"
    # click puts the choices of a missing argument on lines of their own.
    message = " ".join(error.format_message().split())
    parameter = getattr(error, "param", None)
    source = origin(context, parameter) if isinstance(context, click.Context) and parameter is not None else ""
    if source:
        return f"{message.rstrip('.')} (from {source}). See `launch-pipeline config`."
    # A sentence that names a command has the next step already.
    following = "" if "`launch-pipeline" in message else f" See `{command} --help`."
    return f"{message}{'' if message.endswith(('.', '?')) else '.'}{following}"


if __name__ == "__main__":
    main()
