"""`launch-pipeline convert`: options to a conversion, its progress and outcome to text."""

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import Destination
from orchestrator.cli.pipelines import ConversionBar, model_folder
from orchestrator.cli.sentences import say
from orchestrator.machine.drafts.converted_draft import conversion
from orchestrator.machine.drafts.shipped_drafts import default_draft
from protocol.contracts.coreml import Choices, Finished, Progress
from protocol.errors import InputError


@click.command()
@click.argument("model", required=False)
@click.option("--out", "destination", required=True, metavar="DIR", type=Destination(folder=True), help="To be made.")
@click.option("--widths", default="1,8,32", show_default=True, help="Tokens that one call evaluates; a function each.")
@click.option("--context", type=click.IntRange(min=1), help="KV slots.  [default: 2048, or what the model knows]")
@click.option(
    "--weights",
    type=click.Choice(["fp16", "int8", "4bit"]),
    default="fp16",
    show_default=True,
    help="fp16 is exact; int8 has a scale a channel; 4bit a palette a channel, and an int8 head.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@stays_awake
def convert(model: str | None, destination: Path, widths: str, as_json: bool, **options: Any) -> None:
    """Convert MODEL (a folder or Hugging Face id; default: the default draft) for the Neural Engine.

    Takes Llama, Mistral, Ministral 3, Qwen2, Qwen3, SmolLM3, Phi-3 and Phi-4, Gemma 2 and 3, and LFM2 in mlx-lm's
    format, quantised or not, and makes a Core ML package whose functions share their weights. Works on any machine;
    running the package on the Neural Engine takes a Mac.

    \b
    launch-pipeline convert --out default-draft
    launch-pipeline convert MODEL --out qwen --weights int8 --context 4096
    """
    choices = Choices(widths=_widths(widths), **options)
    source = model_folder(model, "draft", default_draft, quiet=as_json)
    finished = _watched(conversion(source, destination, choices), quiet=as_json)
    if as_json:
        click.echo(msgspec.json.encode(finished).decode())
    else:
        Console().print(_summary(finished, choices))
        say(f"On a Mac `launch-pipeline doctor --neural-engine --draft {finished.folder}` examines it.")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError as error:
        raise InputError(f"--widths {text} is no list of numbers: pass for example --widths 1,8,32.") from error


def _watched(reports: Generator[Progress | Finished, None, None], quiet: bool) -> Finished:
    # Closing ends the process, also when Ctrl-C is what ends us.
    with ConversionBar(quiet) as bar, closing(reports):
        for report in reports:
            if isinstance(report, Finished):
                return report
            bar(report)
    raise AssertionError("a conversion ends with its outcome or an error")


def _summary(finished: Finished, choices: Choices) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("package", f"{finished.folder} ({_megabytes(finished.package_bytes)} {choices.weights})")
    grid.add_row("host's tables", _megabytes(finished.host_bytes))
    grid.add_row("context", f"{finished.context} tokens")
    grid.add_row("took", f"{finished.seconds:.1f} s")
    return grid


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
