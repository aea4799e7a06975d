"""`launch-pipeline train-draft`: options to a training, its progress and outcome to text.

The training runs in a process of its own, of which only the reports are known here.
"""

import time
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
from orchestrator.cli.pipelines import ConversionBar
from orchestrator.cli.sentences import say
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.hardware import usable_cores, worker_environment
from orchestrator.text.prompt_files import write_prompts
from protocol.child_process import reports
from protocol.contracts.coreml import Progress
from protocol.contracts.training import (
    DEPTHS,
    LONGEST_PROMPT,
    HeldOut,
    TrainingChoices,
    TrainingFinished,
    TrainingOrder,
    TrainingPaused,
    TrainingProgress,
    TrainingReport,
)
from protocol.errors import InputError

_GRACE = 120.0
"""Seconds for the process to save its state, in which it may have to finish a row."""


def training(order: TrainingOrder, threads: int) -> Generator[Any, None, None]:
    """TrainingProgress as it happens, TrainingFinished or TrainingPaused last. Closing it early saves the state.

    Raises InputError or PipelineError with the process's own sentence if the training fails. `threads`: processor
    threads, where the processor computes.
    """
    return reports(
        "draft_worker.training",
        order,
        TrainingReport,
        (TrainingFinished, TrainingPaused),
        name="The training",
        grace=_GRACE,
        variables=worker_environment("draft", range(threads)),
    )


_PROMPTS = "prompts.jsonl"
_LINE_SECONDS = 10.0


@click.command("train-draft")
@click.option("--target", required=True, metavar="MODEL", help="A folder or Hugging Face id.")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Prompts: JSON lines with `turns` or a `prompt`. Repeatable.",
)
@click.option("--out", required=True, metavar="DIR", type=Destination(folder=True), help="Folder of the drafter.")
@click.option(
    "--work",
    metavar="DIR",
    type=Destination(folder=True),
    help="Folder of the target's answers and states, which several trainings share.  [default: DIR/work]",
)
@click.option(
    "--minutes",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.01),
    help="For all stages of a run; a little more if needed.",
)
@click.option(
    "--tokens",
    default=500_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="That the target writes.",
)
@click.option("--batch", default=2, show_default=True, type=click.IntRange(min=1), help="Rows of 512 tokens a step.")
@click.option("--head", default=8192, show_default=True, type=click.IntRange(min=1), help="Tokens to guess among.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(min=1), help="Of the target.")
@click.option("--threads", type=click.IntRange(min=1), help="Of the processor.  [default: all cores]")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@stays_awake
def train_draft(
    target: str,
    data: tuple[Path, ...],
    out: Path,
    work: Path | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a small draft for a target on the target's own answers.

    The target answers the prompts, and a few of its layers learn to guess what it wrote. After Ctrl-C the same command
    goes on; only the 64 rows of answers or states that were being written are written again. More --minutes continue a
    training that is over.

    \b
    launch-pipeline train-draft --target MODEL --data chats.jsonl --out my-draft
    """
    work = work or out / "work"
    _require_own(out)
    folder = _target(target, quiet=as_json)
    if out.resolve() == folder.resolve():
        raise InputError(f"{out} is the target's own folder: pass a new or empty folder as --out.")
    prompts, ends = _prompts(data, folder, work)
    order = TrainingOrder(
        target=str(folder),
        out=str(out),
        work=str(work),
        prompts=prompts,
        ends=ends,
        choices=TrainingChoices(**options),
    )
    try:
        finished = _watched(order, threads or len(usable_cores()), quiet=as_json)
    except KeyboardInterrupt:
        say(f"Stopped. The same command goes on from the state in {out}.", err=True)
        raise
    if as_json:
        click.echo(msgspec.json.encode(finished).decode())
        return
    _print_outcome(finished)
    following = f'Next: launch-pipeline generate "Why is the sky blue?" --target {target} --draft {out}'
    Console().print(following, highlight=False, soft_wrap=True)


def _print_outcome(finished: TrainingFinished) -> None:
    Console().print(acceptance_table(finished.held_out))
    say(
        f"{finished.folder}: {finished.trained_parameters / 1e6:.1f} M trained parameters, "
        f"{finished.held_out.parameters_per_guess / 1e6:.1f} M read per guess, {finished.steps} steps, "
        f"{finished.tokens / 1e6:.2f} M tokens in {finished.seconds / 60:.0f} minutes."
    )


def acceptance_table(held_out: HeldOut) -> Table:
    """Rows by temperature, columns by depth."""
    table = Table(title="Held-out guesses that are right, where all before them are")
    for name in ("T", *(f"guess {depth + 1}" for depth in range(DEPTHS))):
        table.add_column(name, justify="right")
    for each in held_out.acceptance:
        table.add_row(f"{each.temperature:g}", *("" if rate is None else f"{rate:.3f}" for rate in each.rates))
    return table


def _require_own(out: Path) -> None:
    """A drafter's files replace others of the same names."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: pass a new folder as --out.")
    if out.is_dir() and any(out.iterdir()) and not any((out / name).is_dir() for name in ("training", "work")):
        raise InputError(f"{out} holds other files than a training's: pass a new or empty folder as --out.")


def _target(name: str, quiet: bool) -> Path:
    """A model may be fetched or made for it."""
    with ConversionBar(quiet) as bar:
        return resolve(name, "target", bar)


def _prompts(files: tuple[Path, ...], target: Path, work: Path) -> tuple[str, tuple[int, ...]]:
    """The file of prompts, and the tokens that end answers to them; empty if there are answers already and nothing is
    to be added."""
    if not files:
        if not list((work / "answers").glob("shard-*.npz")):
            raise InputError("A training needs prompts that the target answers: pass files of them as --data.")
        return "", ()
    path = work / _PROMPTS
    written = write_prompts(files, target, path)
    if written.left_out:
        found = written.kept + written.left_out
        say(f"{written.left_out} of {found} prompts are longer than {LONGEST_PROMPT} tokens and left out.", err=True)
    if not written.kept:
        raise InputError(
            'The files of --data hold no prompts that can be used: write one JSON object a line, {"turns": ["..."]}.'
        )
    return str(path), written.ends


def _watched(order: TrainingOrder, threads: int, quiet: bool) -> TrainingFinished:
    """Shows a bar; where standard error is no terminal, a line for each stage and every ten seconds."""
    console, stage, time_shown = Console(stderr=True), "", 0.0
    # Closing asks the process to save its state, also when Ctrl-C is what ends us.
    with ConversionBar(quiet) as bar, closing(training(order, threads)) as reports:
        for report in reports:
            if isinstance(report, TrainingFinished):
                return report
            if isinstance(report, TrainingPaused):
                break
            if console.is_terminal:
                done = round(1000 * report.done / (report.total or 1))
                bar(Progress(f"{report.stage}: {_facts(report)}", done, 1000))
            elif not quiet and (stage != report.stage or time.monotonic() - time_shown > _LINE_SECONDS):
                stage, time_shown = report.stage, time.monotonic()
                share = f"{report.done / report.total:.0%} · " if report.total else ""
                say(f"{stage}: {share}{_facts(report)}", err=True)
    raise KeyboardInterrupt


def _facts(progress: TrainingProgress) -> str:
    facts = [f"{progress.tokens:,} tokens"] if progress.tokens else []
    facts += [] if progress.loss is None else [f"loss {progress.loss:.3f}"]
    facts += [] if progress.acceptance is None else [f"{progress.acceptance:.1%} right"]
    facts += [] if progress.seconds_left is None else [f"{progress.seconds_left / 60:.0f} min left"]
    return " · ".join(facts)
