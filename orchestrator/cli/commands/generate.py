"""`launch-pipeline generate`: a prompt to text and figures."""

import json
import sys
from typing import Any

import click
from rich.console import Console

from orchestrator.api.chat_prompts import own_template
from orchestrator.api.client import Client
from orchestrator.api.result import Result
from orchestrator.api.sampling.sampling_params import SamplingParams
from orchestrator.cli import report
from orchestrator.cli.options import address_option, pipeline_options, without_effect
from orchestrator.cli.pipelines import print_notes, started
from orchestrator.cli.sampling_options import sampling, sampling_options
from orchestrator.runtime.request_state import require_compatible
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError

_ANSWERED = "The prompt is a chat message, since the target has a chat template; --raw continues it as text."
_CONTINUED = "The prompt is continued as text (--raw), although the target has a chat template."


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File("r", encoding="utf-8"), help="Read the prompt from a file; - is stdin.")
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text and summary.")
@click.option("--quiet", is_flag=True, help="Only the text.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, even if the target has a chat template.")
@sampling_options(max_tokens=256)
@pipeline_options
def generate(
    prompt: str | None, prompt_file: Any, as_json: bool, quiet: bool, raw: bool, address: str | None, **options: Any
) -> None:
    """Answer PROMPT, or continue it if the target has no chat template; then show how the speculation went.

    \b
    launch-pipeline generate "Why is the sky blue?"
    launch-pipeline generate "def quicksort(items):" --temperature 0.7 --seed 1
    cat README.md | launch-pipeline generate --prompt-file - --max-tokens 64
    launch-pipeline generate "import os" --strategy ar --json
    """
    text = _prompt(prompt, prompt_file)
    notes = without_effect(options)
    params = sampling(options)
    if address is not None:
        print_notes(notes)
        _run(Client(address), text, params, as_json, quiet, raw)
        return
    if options["draft_engine"] != NO_DRAFT:
        require_compatible(params.verification, options["strategy"])
    with started(options, notes, quiet=quiet or as_json) as pipeline:
        _run(pipeline, text, params, as_json, quiet, raw)


def _prompt(prompt: str | None, file: Any) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError('Give either a prompt or --prompt-file: launch-pipeline generate "import os"')
    try:
        return prompt if prompt is not None else file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt file is not UTF-8 text ({error}): convert it first.") from error


def _run(client: Client, text: str, params: SamplingParams, as_json: bool, quiet: bool, raw: bool) -> None:
    state = client.state()
    template = own_template(state.target)
    chat = template is not None and not raw
    if template is not None and not quiet and not as_json:
        print_notes([_ANSWERED if chat else _CONTINUED])
    with client.stream(client.chat_prompt(text) if chat else text, params) as stream:
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
                sys.stdout.flush()
    result = stream.result
    assert isinstance(result, Result)
    if as_json:
        click.echo(json.dumps({**result.to_json(), "chat": chat, "level": state.level}))
        return
    click.echo()
    if not quiet:
        temperature = state.sampling.temperature if params.temperature is None else params.temperature
        Console(stderr=True).print(report.summary(result, sampled=temperature > 0))
