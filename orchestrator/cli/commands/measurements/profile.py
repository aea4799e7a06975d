"""`launch-pipeline profile`: options to a measurement, a measurement to tables and files."""

from pathlib import Path

import click
from rich.console import Console

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import Destination, facts, option, pipeline_options, without_effect
from orchestrator.cli.pipelines import print_notes
from orchestrator.cli.printing import show
from orchestrator.lab.bench.prompts import read_prompts
from protocol.messages.sampling import AT_ZERO


@click.command(cls=BriefCommand, brief="pair target draft strategy temperature max-tokens seed out json")
@click.argument("prompt", required=False)
@click.option("--temperature", type=float, multiple=True, help="May be given several times.  [default: 0 and 1]")
@click.option("--max-tokens", type=click.IntRange(min=8), default=128, show_default=True)
@option(
    "--seed",
    AT_ZERO,
    type=int,
    default=0,
    show_default=True,
)
@click.option(
    "--out",
    type=Destination(folder=True),
    default=Path("profile"),
    show_default=True,
    help="Folder for trace.perfetto-trace and profile.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@pipeline_options
@facts(requests="in turn")
@stays_awake
def profile(
    prompt: str | None,
    temperature: tuple[float, ...],
    max_tokens: int,
    seed: int,
    out: Path,
    as_json: bool,
    settings: PipelineSettings,
) -> None:
    """Show where the time goes while PROMPT (default: a piece of Python) is continued.

    Measures how much of the draft's and the target's work overlaps, lets each of them do its work again
    alone, and says what the target waited for. Open the trace at
    https://ui.perfetto.dev.

    \b
    launch-pipeline profile
    launch-pipeline profile "import os" --temperature 0.7 --out /tmp/profile
    launch-pipeline profile --strategy ssd --pace m4-16gb-qwen2.5-3b --json
    """
    # Neither numpy nor the trace's schema should slow the other commands' start down.
    from orchestrator.lab.profile.measure import ProfileTask, measure
    from orchestrator.lab.profile.report import findings, require_folder, write_files

    text = prompt if prompt is not None else read_prompts(None, 1)[0].text
    temperatures = tuple(dict.fromkeys(temperature)) or (0.0, 1.0)
    task = ProfileTask(text, temperatures, max_tokens, seed, settings)
    for each in temperatures:
        task.sampling(each, task.max_tokens).submit(text, "check")
    print_notes(without_effect(settings))
    require_folder(out)
    with Console(stderr=True, quiet=as_json).status("Profiling ...") as status:
        measured = measure(task, lambda text: status.update(f"{text} ..."))
        paths = write_files(measured, out)
    show(findings(measured.profile), as_json)
    if not as_json:
        click.echo("\n" + "\n".join(map(str, paths)))
