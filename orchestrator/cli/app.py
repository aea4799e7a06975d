"""The command line: its commands, its settings, and what becomes of errors. Only the command line prints."""

import importlib
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
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
_OTHER_NAMES = {"benchmark": "bench", "list-models": "pairs", "run": "generate"}
"""Names that other programs give to commands; `--help` does not list them."""


_OTHER_OPTIONS = {
    "--ctx-size": "--context",
    "--device": "--pace",
    "--draft-model": "--draft",
    "--host": "--address",
    "--max-new-tokens": "--max-tokens",
    "--model": "--target",
    "--model-draft": "--draft",
    "--n-predict": "--max-tokens",
    "--num-ctx": "--context",
    "--num-predict": "--max-tokens",
    "--output": "--out",
    "--port": "--address",
    "--temp": "--temperature",
}
"""What other programs call options; the sentence about an unknown option names ours."""


class CommandTable(MutableMapping[str, click.Command]):
    """Imports a command when it is asked for, since all of them together take half a second."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._read: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._read:
            module, attribute = self._places[name].split(":")
            command = getattr(importlib.import_module(f"orchestrator.cli.commands.{module}"), attribute)
            read_environment(command, (name,))
            self._read[name] = command
        return self._read[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._read[name] = command

    def __delitem__(self, name: str) -> None:
        del self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._read})

    def __len__(self) -> int:
        return len({**self._places, **self._read})


class Commands(Group):
    """Knows commands by other names too. Errors of the Python API get a hint at the command line's own help here, and
    nowhere else."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _OTHER_NAMES.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Settings, warnings and help belong to a command's own name, so that is the name it gets. `run` without a
        prompt at a terminal is a chat, as in other programs."""
        name, command, rest = super().resolve_command(ctx, args)
        if name == "run" and command is not None and sys.stdin.isatty():
            chat = self.commands["chat"]
            if _opens(chat, command, ctx, rest):
                return chat.name, chat, rest
        return name and _OTHER_NAMES.get(name, name), command, rest

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


def _opens(chat: click.Command, command: click.Command, context: click.Context, words: list[str]) -> bool:
    """Whether these words of `command` are those of a chat: no prompt, and options that a chat has too."""
    try:
        given, *_ = command.make_parser(click.Context(command, parent=context)).parse_args(list(words))
    except click.UsageError:
        return False
    return not isinstance(given.pop("prompt", None), str) and given.keys() <= {each.name for each in chat.params}


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
    message = " ".join(_mistake(error).split())
    parameter = getattr(error, "param", None)
    source = origin(context, parameter) if isinstance(context, click.Context) and parameter is not None else ""
    if source:
        return f"{message.rstrip('.')} (from {source}). See `launch-pipeline config`."
    # A sentence that names a command has the next step already.
    following = "" if "`launch-pipeline" in message else f" See `{command} --help`."
    return f"{message}{'' if message.endswith(('.', '?')) else '.'}{following}"


def _mistake(error: click.ClickException) -> str:
    """click's sentence, with our name of an option that other programs call otherwise."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        ours = _OTHER_OPTIONS.get(error.option_name, "")
        if ours in (flag for each in error.ctx.command.params for flag in each.opts):
            return f"No such option {error.option_name!r}. Did you mean {ours!r}?"
    return error.format_message()


if __name__ == "__main__":
    main()
