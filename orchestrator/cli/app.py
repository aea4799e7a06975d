"""The command line: its commands, its settings, and what becomes of errors. Only the command line prints."""

import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from orchestrator.api.client import NoPipeline
from orchestrator.api.ineffective import IneffectiveOption
from orchestrator.api.validation import InvalidValue
from orchestrator.cli.commands.attach import attach, target_rank
from orchestrator.cli.commands.cache import cache
from orchestrator.cli.commands.chat import chat
from orchestrator.cli.commands.completion import completion
from orchestrator.cli.commands.config import config
from orchestrator.cli.commands.convert import convert
from orchestrator.cli.commands.doctor import doctor
from orchestrator.cli.commands.drill import drill
from orchestrator.cli.commands.generate import generate
from orchestrator.cli.commands.launch.command import launch
from orchestrator.cli.commands.measurements.bench import bench
from orchestrator.cli.commands.measurements.calibrate import calibrate
from orchestrator.cli.commands.measurements.first_light import first_light
from orchestrator.cli.commands.measurements.profile import profile
from orchestrator.cli.commands.pairs import pairs_command
from orchestrator.cli.commands.plan import plan
from orchestrator.cli.commands.serve import serve
from orchestrator.cli.commands.service.command import service
from orchestrator.cli.commands.start import serve_workers, start, workers
from orchestrator.cli.commands.train_draft import train_draft
from orchestrator.cli.configuration import default_map, origin, read_environment
from orchestrator.cli.pipeline_options import nearest
from protocol.errors import InputError, PipelineError
from protocol.paths import config_file

_INTERRUPTED = 130
_FAILED = 1
_COMMANDS = (
    *(attach, bench, cache, calibrate, chat, completion, config, convert, doctor, drill, first_light, generate),
    *(launch, pairs_command, plan, profile, serve, serve_workers, service, start, target_rank, train_draft, workers),
)
_OTHER_NAMES = {"benchmark": "bench", "list-models": "pairs", "run": "generate"}
"""Names that other programs give to commands; `--help` does not list them."""


_OTHER_OPTIONS = {
    "--ctx-size": "--context",
    "--device": "--pace",
    "--draft-model": "--draft",
    "--max-new-tokens": "--max-tokens",
    "--model": "--target",
    "--model-draft": "--draft",
    "--n-predict": "--max-tokens",
    "--num-ctx": "--context",
    "--num-predict": "--max-tokens",
    "--output": "--out",
    "--temp": "--temperature",
}
"""What other programs call options; the sentence about an unknown option names ours."""
_WHOLE = 1000
"""Characters; no first sentence is longer."""


class Commands(click.Group):
    """Knows commands by other names too. Errors of the Python API get a hint at the command line's own help here, and
    nowhere else."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _OTHER_NAMES.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Settings, warnings and help belong to a command's own name, so that is the name it gets."""
        name, command, rest = super().resolve_command(ctx, args)
        return name and _OTHER_NAMES.get(name, name), command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Whole sentences, over as many lines as they need."""
        rows = [(name, self.commands[name].get_short_help_str(_WHOLE)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidValue as error:
            raise InputError(f"{error} See `launch-pipeline {ctx.invoked_subcommand} --help`.") from error
        except NoPipeline as error:
            hint = f"start one with `launch-pipeline start --address {error.address}`"
            raise PipelineError(f"No pipeline answers at {error.address}: {hint}.") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
        click.echo(f"Error: {_usage(error)}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(_INTERRUPTED)
    except PipelineError as error:
        click.echo(f"Error: {error}", err=True)
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
    message = " ".join(_suggestion(error).split())
    parameter = getattr(error, "param", None)
    source = origin(context, parameter) if isinstance(context, click.Context) and parameter is not None else ""
    if source:
        return f"{message.rstrip('.')} (from {source}). See `launch-pipeline config`."
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{command} --help`."


def _suggestion(error: click.ClickException) -> str:
    """click's sentence; for an unknown option, with the one that is most likely meant instead of all that are near."""
    if not isinstance(error, click.NoSuchOption):
        return error.format_message()
    ours = _OTHER_OPTIONS.get(error.option_name)
    known = [] if error.ctx is None else [flag for each in error.ctx.command.params for flag in each.opts]
    near = [ours] if ours in known else nearest(error.option_name, error.possibilities or ())
    return f"No such option {error.option_name!r}.{f' Did you mean {near[0]!r}?' if near else ''}"


for command in _COMMANDS:
    cli.add_command(command)
read_environment(cli)


if __name__ == "__main__":
    main()
