"""`launch-pipeline generate`: a prompt to text and figures."""

import functools
import json
import os
import stat
import sys
import time
from typing import Any

import click
from rich.console import Console

from orchestrator.api.client import Client
from orchestrator.api.result import Result
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.settings import PipelineSettings
from orchestrator.cli import printing
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.pipeline_options import address_option, facts, option, pipeline_options, without_effect
from orchestrator.cli.pipelines import first_models, print_notes, started
from orchestrator.cli.running_pipelines import KEPT_MINUTES, minutes_to_keep, plain, running_pipeline
from orchestrator.cli.sampling_options import sampling, sampling_options
from orchestrator.machine.default_target import demo_note
from orchestrator.text.chat_template import own_template
from protocol.bounded_files import bounded
from protocol.errors import InputError, PipelineError
from protocol.ineffective import SET, Ineffective

_ANSWERED = "The prompt is a chat message, since the target has a chat template; --raw continues it as text."

_KEPT = "The models stay loaded for {:g} minutes for the next command (--keep): `launch-pipeline stop` ends them."
_NOTHING = "The model ended the text at once: to it, nothing follows this prompt."
_PROMPT_MIB = 16
"""Sixteen characters for each token of the longest context."""
_FULL = (
    "The answer ended because the context of {:,} tokens is full. Ctrl-C or --max-tokens ends one sooner that repeats "
    "itself."
)
_WITHOUT_RAW = "Without --raw it would be a message that is answered."


@click.command(
    cls=BriefCommand, brief="pair target draft address prompt-file raw max-tokens temperature preset seed json quiet"
)
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File("r", encoding="utf-8"), help="Read the prompt from a file; - is stdin.")
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text and summary.")
@option(
    "--quiet",
    Ineffective("JSON comes without text and figures beside it anyway", as_json=True),
    is_flag=True,
    help="Only the text.",
)
@click.option("--stats", is_flag=True, help="Show every figure: acceptance, who was busy and more.")
@option(
    "--keep",
    Ineffective("the pipeline that is asked runs already", running=SET),
    type=click.FloatRange(0, 1440),
    metavar="MINUTES",
    help="Keep the models loaded for the next command, until so long after the last one. `launch-pipeline stop` ends "
    f"them. Default: {KEPT_MINUTES:.0f} on a terminal if they take at most a quarter of the memory, else 0.",
)
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, even if the target has a chat template.")
@sampling_options
@pipeline_options
@facts(requests="one", tokenizes=False)
def generate(
    prompt: str | None,
    prompt_file: Any,
    as_json: bool,
    quiet: bool,
    stats: bool,
    raw: bool,
    keep: float | None,
    running: str | None,
    settings: PipelineSettings,
    **options: Any,
) -> None:
    """Answer PROMPT, or continue it if the target has no chat template; then show what speculation gained.

    Text from a pipe is the prompt, or follows PROMPT as a document.

    \b
    launch-pipeline generate "Why is the sky blue?"
    launch-pipeline generate "def quicksort(items):" --temperature 0.7 --seed 1
    cat README.md | launch-pipeline generate "Summarise this." --max-tokens 64
    launch-pipeline generate "import os" --strategy ar --json
    """
    text = prompt_text(prompt, prompt_file)
    notes = without_effect(settings, **options)
    params = sampling(options)
    silent = quiet or as_json
    ask = functools.partial(_ask, text=text, params=params, as_json=as_json, silent=silent, stats=stats, raw=raw)
    if running is None:
        settings, first = first_models(settings, asks=not silent)
        notes.append("" if silent else first)
    lasting = running_pipeline(settings) if running is None else Client(running)
    if lasting is not None:
        print_notes(notes)
        ask(lasting)
        return
    if keep and not plain(settings):
        notes.append("--keep has no effect: a later command only finds a pipeline with default options.")
    begun = time.monotonic()
    with started(settings, notes, quiet=silent) as pipeline:
        ask(pipeline, loading=time.monotonic() - begun)
        if minutes := minutes_to_keep(0.0 if keep is None and silent else keep, pipeline, settings):
            pipeline.leave(minutes * 60)
            print_notes(["" if silent else _KEPT.format(minutes)])


def prompt_text(prompt: str | None, file: Any) -> str:
    """The prompt, or the file's text; what a pipe brings is the prompt, or a document behind it."""
    if prompt is not None and file is not None:
        raise click.UsageError('Give either a prompt or --prompt-file: launch-pipeline generate "import os"')
    try:
        if file is not None:
            return bounded(file, _PROMPT_MIB)
        document = _piped().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt file or pipe is not UTF-8 text ({error}): convert it first.") from error
    except OSError as error:
        raise InputError(f"The prompt file or pipe can't be read ({error.strerror}): give a text that ends.") from error
    if prompt is None and not document.strip():
        raise click.UsageError('Give a prompt, --prompt-file or a pipe: launch-pipeline generate "import os"')
    return "\n\n".join(part for part in (prompt, document) if part)


def _piped() -> str:
    """The text of a pipe or a file on standard input. Anything else is not read: it might never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return ""  # closed
    return bounded(sys.stdin.buffer, _PROMPT_MIB).decode() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def _ask(
    client: Client,
    *,
    text: str,
    params: SamplingParams,
    as_json: bool,
    silent: bool,
    stats: bool,
    raw: bool,
    loading: float | None = None,
) -> None:
    """`silent`: nothing but the answer. `loading`: seconds until the pipeline was ready, if this command started it."""
    state = client.state()
    template = own_template(state.target)
    chat = None if raw else template
    if not silent:
        # Once for each time that models are loaded.
        print_notes([demo_note(state.target), _ANSWERED if chat is not None and loading is not None else ""])
    with (
        client.stream(text if chat is None else chat.tokens([{"role": "user", "content": text}]), params) as stream,
        Console(stderr=True, quiet=silent).status(printing.READING) as status,
    ):
        stream.watch_reading(lambda *told: status.update(printing.reading(*told)))
        for piece in stream:
            status.stop()
            if not as_json:
                click.echo(piece, nl=False)
                sys.stdout.flush()
    result = stream.result
    assert isinstance(result, Result)
    if as_json:
        click.echo(json.dumps({**result.to_json(), "chat": chat is not None, "level": state.level}))
    else:
        click.echo()
    if not silent:
        temperature = state.sampling.temperature if params.temperature is None else params.temperature
        Console(stderr=True).print(printing.summary(result, sampled=temperature > 0, every=stats, loading=loading))
        if not result.text.strip() and result.finish_reason == "stop":
            print_notes([_NOTHING if chat is not None or template is None else f"{_NOTHING} {_WITHOUT_RAW}"])
    limit = printing.cut_off(result, params.max_tokens, _FULL.format(state.context))
    if limit and params.json_schema is not None:
        raise PipelineError(f"The JSON is incomplete. {limit}")
    print_notes(["" if silent else limit])
