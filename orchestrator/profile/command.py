"""`launch-pipeline profile`: options into a measurement, a measurement into tables and files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from orchestrator.bench.prompts import read_prompts
from orchestrator.profile.table import tables
from orchestrator.sampling_params import SamplingParams

_NARROWEST = 104
"""Characters the tables need."""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def profile_command(pipeline_options: Decorator) -> click.Command:
    """The command, with the options that every command with a pipeline has."""

    @click.command(name="profile")
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
        _profile(prompt if prompt is not None else read_prompts(None, 1)[0], out, as_json, options)

    return profile


def _profile(prompt: str, out: Path, as_json: bool, options: dict[str, Any]) -> None:
    # Neither matplotlib nor the trace's schema should slow the other commands' start down.
    from orchestrator.profile.files import require_folder, write_files
    from orchestrator.profile.measure import Task, measure

    temperatures = tuple(dict.fromkeys(options.pop("temperature"))) or (0.0, 1.0)
    tokens, seed = options.pop("max_tokens"), options.pop("seed")
    for each in temperatures:
        SamplingParams(temperature=each, seed=seed, max_tokens=tokens).submit(prompt, "check")
    given = {name: value for name, value in options.items() if value is not None}
    if given["draft_engine"] == "none":
        given["strategy"] = "ar"
    require_folder(out)
    with Console(stderr=True, quiet=as_json).status("Profiling ...") as status:
        measured = measure(Task(prompt, temperatures, tokens, seed, given), lambda text: status.update(f"{text} ..."))
        paths = write_files(measured, out)
    if as_json:
        click.echo(msgspec.json.encode(measured.profile).decode())
        return
    console = Console()
    console = console if console.is_terminal else Console(width=max(_NARROWEST, console.width))
    console.print(tables(measured.profile))
    click.echo("\n" + "\n".join(map(str, paths)))
