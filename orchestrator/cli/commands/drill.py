"""`launch-pipeline drill`: names to drills, outcomes to a table and an exit code."""

import os
import random
from collections.abc import Callable
from typing import get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.report import show
from orchestrator.lab.drill.outcome import DrillName, DrillOutcome, findings
from orchestrator.machine.downloads.default_target import VARIABLE

_NAMES = get_args(DrillName)


@click.command(epilog=f"NAMEs: {', '.join(_NAMES)}.")
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(_NAMES))
@click.option("--count", type=click.IntRange(min=1), help="Faults of each drill.  [default: a few]")
@click.option("--minutes", type=click.FloatRange(min=0.1), help="How long soak and conversations take.")
@click.option("--full", is_flag=True, help="As many faults as the promises speak of; about an hour for all.")
@click.option("--seed", type=click.IntRange(min=0), help="Equal seeds give equal faults.  [default: a fresh one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@stays_awake
def drill(
    names: tuple[DrillName, ...],
    count: int | None,
    minutes: float | None,
    full: bool,
    seed: int | None,
    as_json: bool,
) -> None:
    """Break a pipeline on purpose, and see whether it keeps its promises.

    Starts pipelines of its own, kills and stops their processes, sends garbage, presses Ctrl-C. Runs the drills
    with these NAMEs, or all of them. Ends with exit code 1 if a promise was not kept.

    \b
    launch-pipeline drill
    launch-pipeline drill draft-kill target-kill --count 20 --seed 1
    launch-pipeline drill soak conversations --minutes 20
    launch-pipeline drill --full --json > promises.json
    """
    from orchestrator.lab.drill.registry import DRILLS, drill_counts

    # The promises are about the pipeline, so the pair that is always there serves, in every process of a drill.
    os.environ[VARIABLE] = "demo"
    # A short number, because a user may type it to repeat the faults.
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    outcomes: dict[str, DrillOutcome] = {}
    with _progress(quiet=as_json) as progress:
        for name, number in drill_counts(names, count, full, minutes).items():
            outcomes[name] = DRILLS[name].run(number, seed, _stepper(progress, name, number))
    show(findings(outcomes, seed), as_json)


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, quiet=quiet))


def _stepper(progress: Progress, name: str, count: int) -> Callable[[], None]:
    task = progress.add_task(name, total=count)
    return lambda: progress.advance(task)
