"""`launch-pipeline first-light`: options to a run, its stages to lines on stderr, its folder to a next step."""

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import Destination
from orchestrator.cli.sentences import say
from orchestrator.lab.first_light.stages import StageScreen, stage_names
from orchestrator.machine.conditions import conditions

if TYPE_CHECKING:
    from orchestrator.lab.first_light.report import LightReport, StageReport
    from orchestrator.lab.first_light.stages import Stage

_FAILED = 1
_FOLDER = "first-light"
_MARKS = {
    "done": "[green]done[/]",
    "failed": "[red]failed[/]",
    "not here": "[dim]not here[/]",
    "skipped": "[dim]skipped[/]",
}
_STAGES = click.Choice(stage_names())


@click.command("first-light", epilog=f"STAGEs: {', '.join(stage_names())}.")
@click.option("--short", is_flag=True, help="The demo pair and few tokens: whether everything runs, not how fast.")
@click.option("--only", multiple=True, type=_STAGES, metavar="STAGE", help="Only this stage, also if it is done.")
@click.option("--skip", multiple=True, type=_STAGES, metavar="STAGE", help="Not this stage.")
@click.option("--minutes", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="At most, in all.")
@click.option(
    "--out",
    type=Destination(folder=True),
    help=f"Folder to write.  [default: {_FOLDER} here; a numbered one if that is of another run]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@stays_awake
def first_light(
    short: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    minutes: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure everything that is worth knowing about this machine, in one folder to send.

    Checks, exactness, costs, the Neural Engine, overlap, prompts, and comparisons with mlx-lm: an hour at
    most, without sudo. Ctrl-C stops it; the same command goes on where it stopped. Each question has an answer, or the
    reason why this machine can't give one. The folder has a page, one JSON object, a device profile and logs, without
    prompts, names or paths. Ends with exit code 1 if something is wrong.

    \b
    launch-pipeline first-light
    launch-pipeline first-light --short
    launch-pipeline first-light --minutes 15 --skip second-bench
    launch-pipeline first-light --only sleep
    """
    from orchestrator.lab.bench.prompts import shipped_prompts
    from orchestrator.lab.first_light.folder import LightFolder, this_run
    from orchestrator.lab.first_light.redaction import Redactor
    from orchestrator.lab.first_light.run import Choice, run
    from orchestrator.lab.first_light.stages import LightSettings

    settings = LightSettings(short=short)
    wanted = [] if only else [name for name in stage_names() if name not in skip]
    began = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    redactor = Redactor.of_this_machine(shipped_prompts())
    folder = LightFolder.of(out or Path(_FOLDER), this_run(settings, began), redactor, wanted)
    if not as_json:
        verb = "Going on with" if folder.resumed else "Writing to"
        advice = "Ctrl-C stops; the same command goes on. Leave the machine alone meanwhile."
        say(f"{verb} {folder.path}. {advice}", err=True)
        now = conditions()
        if now.power.startswith("Battery") or now.mode == "low power":
            say(f"This machine is slower now than it can be: {now.speed}.", err=True)
    try:
        with _Screen(quiet=as_json) as screen:
            report = run(folder, settings, Choice(minutes, only, skip), screen)
    except KeyboardInterrupt:
        done = f"{len(folder.done())} of {len(stage_names())} stages are in {folder.path} and {folder.archive().name}"
        say(f"{done}; the same command goes on with the others.", err=True)
        raise
    archive = folder.archive()
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _tell_end(folder.path, archive, report)
    if not all(stage.good for stage in report.stages):
        sys.exit(_FAILED)


def _tell_end(path: Path, archive: Path, report: "LightReport") -> None:
    for sentence in (sentence for row in report.questions for sentence in row.answers):
        say(sentence)
    open_ones: dict[str, list[str]] = {}
    for row in report.questions:
        if not row.answers:
            open_ones.setdefault(row.reason, []).append(row.question)
    for reason, questions in open_ones.items():
        say(f"Not answered: {'; '.join(questions)} ({reason.rstrip('.')}).")
    # As short as it can be typed here.
    sent = archive.relative_to(Path.cwd()) if archive.is_relative_to(Path.cwd()) else archive
    say(f"Page:   {path / 'index.html'}\nReport: {path / 'report.json'}\nTo send: {sent}")
    if wrong := [stage.stage for stage in report.stages if not stage.good]:
        say(f"Something is wrong in: {', '.join(wrong)}. The page says what.")
    if failed := [stage.stage for stage in report.stages if stage.status == "failed"]:
        say(
            f"The same command measures again what failed ({', '.join(failed)}), and keeps what is done. For a new run "
            "pass another folder as --out."
        )
    say(
        "Next: look at the page, then open an issue in this project's repository with the form `First light`, and "
        "attach the zip. It has no prompts, names or paths."
    )


class _Screen(StageScreen):
    """A line a stage on stderr: its state, elapsed and remaining time, and what it does now."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True, quiet=quiet)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._console = console
        now = TextColumn("{task.fields[now]}", style="dim")
        self._progress = Progress(*columns, now, console=console, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> "_Screen":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def began(self, stage: "Stage", seconds_left: float) -> None:
        words = f"{stage.name}, at most {seconds_left / 60:.0f} min left"
        self._task = self._progress.add_task(words, now="starting")

    def notice(self, words: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, now=escape(words))

    def ended(self, report: "StageReport", known: bool) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        took = ", before" if known else f", {report.seconds:.0f} s" if report.seconds else ""
        wrong = "" if report.good or report.status == "failed" else " [red]found something wrong[/]"
        reason = f": {escape(report.reason)}" if report.reason else ""
        line = f"{_MARKS[report.status]} {escape(report.title)}{took}{reason}{wrong}"
        self._console.print(line, soft_wrap=True, highlight=False)
