"""The command line. Turns options into calls and results into text; the only place that prints."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.console import Console

from orchestrator.api.client import Client
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.result import Result
from orchestrator.api.sampling_params import SamplingParams
from orchestrator.cli import report
from orchestrator.cli.chat.command import chat_command
from orchestrator.cli.commands.attach import attach
from orchestrator.cli.commands.bench import bench
from orchestrator.cli.commands.calibrate import calibrate
from orchestrator.cli.commands.config import config
from orchestrator.cli.commands.convert import convert
from orchestrator.cli.commands.drill import drill
from orchestrator.cli.commands.pairs import pairs_command
from orchestrator.cli.commands.plan import plan
from orchestrator.cli.commands.profile import profile_command
from orchestrator.cli.commands.serve import serve_command
from orchestrator.cli.commands.start import serve_commands
from orchestrator.cli.commands.target_rank import target_hosts_option, target_rank
from orchestrator.cli.commands.workers import workers
from orchestrator.cli.configuration import default_map, hear_environment, origin
from orchestrator.cli.conversion_bar import ConversionBar
from orchestrator.cli.draft_engine_option import draft_engine_option
from orchestrator.cli.pace_option import pace_option
from orchestrator.cli.pair_option import pair_option
from orchestrator.cli.sampling_options import sampling, sampling_options
from orchestrator.runtime.request_state import require_compatible
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError, PipelineError
from protocol.paths import config_file

_INTERRUPTED = 130
_FAILED = 1
_PIPELINE_OPTIONS = [
    click.option("--target", metavar="MODEL", help="Folder or Hugging Face id (mlx-lm format). Default: demo model."),
    click.option(
        "--draft",
        metavar="MODEL",
        help="The same for the draft; it needs the target's tokenizer. Default: demo model, where that fits.",
    ),
    draft_engine_option(optional=True),
    click.option(
        "--strategy",
        type=click.Choice(["ar", "sd", "ssd", "adaptive"]),
        default="adaptive",
        show_default=True,
        help="ar: target alone; sd: draft and verify in turns; ssd: the published parallel algorithm; "
        "adaptive: whatever promises the most tokens a second.",
    ),
    click.option("--draft-tokens", type=int, help="K, the chain length of sd and ssd.  [default: 4]"),
    click.option("--draft-width", type=int, help="Most tree nodes a growth step evaluates (adaptive).  [default: 16]"),
    click.option("--draft-fan", type=int, help="Children a tree node gets (adaptive).  [default: 8]"),
    click.option("--max-verify", type=int, help="Most draft nodes in one verification.  [default: 16]"),
    click.option("--fan-budget", type=int, help="B, the bonus guesses of ssd in all.  [default: 15]"),
    click.option("--fallback", type=click.Choice(["neural", "fast", "adaptive"]), help="What ssd does on a miss."),
    click.option("--saguaro", type=float, help="C in [0, 1]: Saguaro sampling of ssd with rejection verification."),
    click.option(
        "--prefill-engine",
        type=click.Choice(["none", "mlx", "coreml", "guest"]),
        default="none",
        show_default=True,
        help="Read prompts in a process of their own; guest: by `attach prefill`, which is then trusted with the text.",
    ),
    click.option("--prefill", type=click.Choice(["auto", "always"]), help="When: if it is faster, or always."),
    click.option(
        "--concurrent", type=int, help="Requests decoded at the same time; others wait for their turn.  [default: 16]"
    ),
    click.option("--arena-memory", type=int, help="MiB of shared memory for KV of ended requests.  [default: 2048]"),
    click.option("--prefix-cache-memory", type=int, help="MiB of each worker's memory for the same.  [default: 512]"),
    target_hosts_option,
    click.option("--record", type=click.Path(dir_okay=False, writable=True), help="Write the event log to a file."),
    pace_option,
]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="launch-pipeline")
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
    launch-pipeline generate "def quicksort(items):"     with the demo models that come along
    launch-pipeline doctor                               what this machine has, and what is missing
    """
    chosen = file or (config_file() if config_file().is_file() else None)
    if chosen is not None:
        context.meta["configuration"] = chosen
        context.default_map = default_map(cli, chosen)


def pipeline_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_PIPELINE_OPTIONS):
        command = option(command)
    return pair_option(command)


@cli.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File("r", encoding="utf-8"), help="Read the prompt from a file; - is stdin.")
@click.option("--address", help="Ask a pipeline that already runs there, instead of starting one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text and summary.")
@click.option("--quiet", is_flag=True, help="Only the text.")
@sampling_options(max_tokens=256)
@pipeline_options
def generate(
    prompt: str | None, prompt_file: Any, as_json: bool, quiet: bool, address: str | None, **options: Any
) -> None:
    """Continue PROMPT with text, then show how the speculation went.

    \b
    launch-pipeline generate "def quicksort(items):" --temperature 0.7 --seed 1
    cat README.md | launch-pipeline generate --prompt-file - --max-tokens 64
    launch-pipeline generate "import os" --strategy ar --json
    """
    text = _prompt(prompt, prompt_file)
    params = sampling(options)
    if address is not None:
        _run(Client(address), text, params, as_json, quiet)
        return
    if options["draft_engine"] != NO_DRAFT:
        require_compatible(params.verification, options["strategy"])
    with _started(options, quiet=quiet or as_json) as pipeline:
        _run(pipeline, text, params, as_json, quiet)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--neural-engine", is_flag=True, help="Examine instead whether a draft can run on the Neural Engine.")
@click.option("--draft", metavar="MODEL", help="With --neural-engine: which one. Default: the demo draft.")
@click.option(
    "--runtime", type=click.Choice(["coreml", "executor"]), help="With --neural-engine: executor rehearses it."
)
def doctor(as_json: bool, neural_engine: bool, draft: str | None, runtime: Any) -> None:
    """Say what this machine has, what will be used, and the next step for what is missing.

    \b
    launch-pipeline doctor
    launch-pipeline doctor --json
    """
    from orchestrator.tools.doctor.doctor import examine, to_json

    findings = _neural_engine(draft, runtime, quiet=as_json) if neural_engine else examine()
    if as_json:
        click.echo(json.dumps(to_json(findings)))
    else:
        Console().print(report.findings_table(findings))
    if any(finding.status == "fail" for finding in findings):
        sys.exit(_FAILED)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    eval "$(launch-pipeline completion zsh)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "launch-pipeline", "_LAUNCH_PIPELINE_COMPLETE").source())


cli.add_command(attach)
cli.add_command(bench)
cli.add_command(calibrate)
cli.add_command(config)
cli.add_command(convert)
cli.add_command(drill)
cli.add_command(pairs_command)
cli.add_command(plan)
cli.add_command(profile_command(pipeline_options))
cli.add_command(workers)
cli.add_command(target_rank)


def main() -> None:
    """The installed command: every failure is one sentence and a proper exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        # Whoever read our output has gone; nobody is left to tell.
        sys.stderr.close()
        sys.exit(_FAILED)


def _usage(error: click.ClickException) -> str:
    """What is wrong and where to look, on one line."""
    context = getattr(error, "ctx", None)
    command = context.command_path if isinstance(context, click.Context) else "launch-pipeline"
    message = error.format_message()
    parameter = getattr(error, "param", None)
    source = origin(context, parameter) if isinstance(context, click.Context) and parameter is not None else ""
    if source:
        return f"{message.rstrip('.')} (from {source}). See `launch-pipeline config`."
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{command} --help`."


def _neural_engine(draft: str | None, runtime: Any, quiet: bool) -> Any:
    """An examination of minutes, which says on stderr what it is at."""
    from orchestrator.tools.doctor.neural_engine import examined

    def say(words: str) -> None:
        if not quiet:
            click.echo(f"Examining: {words}", err=True)

    with ConversionBar(quiet) as bar:
        return examined(draft, runtime, on_progress=bar, on_stage=say)


def _prompt(prompt: str | None, file: Any) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError('Give either a prompt or --prompt-file: launch-pipeline generate "import os"')
    try:
        return prompt if prompt is not None else file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt file is not UTF-8 text ({error}): convert it first.") from error


def _started(options: dict[str, Any], *, quiet: bool) -> Any:
    """A pipeline that shows a spinner on stderr while it starts."""
    return report.Starting(_opened(options, quiet=quiet), quiet)


def _opened(options: dict[str, Any], *, quiet: bool) -> Pipeline:
    """A pipeline that is not started yet; a draft may be converted for it."""
    given = {name: value for name, value in options.items() if value is not None}
    with ConversionBar(quiet) as bar:
        pipeline = Pipeline(on_progress=bar, **given)
    if pipeline.note:
        click.echo(pipeline.note, err=True)
    return pipeline


def _run(client: Client, text: str, params: SamplingParams, as_json: bool, quiet: bool) -> None:
    with client.stream(text, params) as stream:
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
                sys.stdout.flush()
    result = stream.result
    assert isinstance(result, Result)
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    click.echo()
    if not quiet:
        Console(stderr=True).print(report.summary(result, sampled=params.temperature > 0))


cli.add_command(serve_command(pipeline_options, _opened))
cli.add_command(chat_command(pipeline_options, _started))
for command in serve_commands(pipeline_options, _started):
    cli.add_command(command)
hear_environment(cli)


if __name__ == "__main__":
    main()
