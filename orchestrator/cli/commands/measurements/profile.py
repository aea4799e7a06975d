"""`launch-pipeline profile`: options to a measurement, a measurement to tables and files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.options import given_only, pipeline_options, without_effect
from orchestrator.cli.pipelines import print_notes
from orchestrator.cli.report import show
from orchestrator.lab.bench.prompts import read_prompts

if TYPE_CHECKING:
    from orchestrator.lab.profile.measure import ProfileTask

_OWN = ("temperature", "max_tokens", "seed")
"""Options that are not the pipeline's."""


@click.command()
@click.argument("prompt", required=False)
@click.option("--temperature", type=float, multiple=True, help="May be given several times.  [default: 0 and 1]")
@click.option("--max-tokens", type=click.IntRange(min=8), default=128, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("profile"),
    show_default=True,
    help="Folder for report.html, timeline.png, trace.perfetto-trace and profile.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@pipeline_options
@stays_awake
def profile(prompt: str | None, out: Path, as_json: bool, **options: Any) -> None:
    """Show where the time goes while PROMPT (default: a piece of Python) is continued.

    Measures how much of the draft's and the target's work overlaps, lets each of them do its work again
    alone, and says what the target waited for. Open report.html in a browser, and the trace at
    https://ui.perfetto.dev.

    \b
    launch-pipeline profile
    launch-pipeline profile "import os" --temperature 0.7 --max-tokens 256 --out /tmp/profile
    launch-pipeline profile --strategy ssd --pace m4-16gb-qwen2.5-3b --json
    """
    task = _task(prompt if prompt is not None else read_prompts(None, 1)[0].text, options)
    print_notes(without_effect(options))
    _profile(task, out, as_json)


def _task(prompt: str, options: dict[str, Any]) -> "ProfileTask":
    """Raises InputError for a temperature, seed or number of tokens that can't be."""
    # Neither numpy nor matplotlib nor the trace's schema should slow the other commands' start down.
    from orchestrator.lab.profile.measure import ProfileTask

    temperatures = tuple(dict.fromkeys(options["temperature"])) or (0.0, 1.0)
    given = {name: value for name, value in given_only(options).items() if name not in _OWN}
    task = ProfileTask(prompt, temperatures, options["max_tokens"], options["seed"], given)
    for each in temperatures:
        task.sampling(each, task.max_tokens).submit(prompt, "check")
    return task


def _profile(task: "ProfileTask", out: Path, as_json: bool) -> None:
    from orchestrator.lab.profile.measure import measure
    from orchestrator.lab.profile.report import findings, require_folder, write_files

    require_folder(out)
    with _notice(as_json) as notice:
        measured = measure(task, notice)
        paths = write_files(measured, out)
    show(findings(measured.profile), as_json)
    if not as_json:
        click.echo("\n" + "\n".join(map(str, paths)))


@contextmanager
def _notice(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Says on stderr what is going on."""
    with Console(stderr=True, quiet=quiet).status("Profiling ...") as status:
        yield lambda text: status.update(f"{text} ...")
