"""`launch-pipeline calibrate`: options to a measurement, a profile to a file and a table."""

import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import Destination, draft_engine_option, draft_option, pair_option, target_option
from orchestrator.cli.pipelines import target_folder
from orchestrator.cli.printing import show
from orchestrator.cli.sentences import say
from orchestrator.machine.profiles.device_profiles import calibration_file

SAMPLES = 30
"""Forwards of each width."""


@click.command()
@pair_option
@target_option
@draft_option()
@draft_engine_option("engine", with_model=True)
@click.option(
    "--out",
    metavar="FILE",
    type=Destination(),
    help="Profile to write. Default: this user's own, which `plan` reads.",
)
@stays_awake
def calibrate(out: Path | None, **options: Any) -> None:
    """Measure what this machine takes for a pair of models, and write a device profile.

    Target and draft run in their worker processes: forwards over 1 to 32 tokens, prompts, and both at
    once. Nothing else should run meanwhile.

    \b
    launch-pipeline calibrate
    launch-pipeline calibrate --pair qwen2.5-3b --out mine.toml
    launch-pipeline bench --pace mine.toml
    """
    from orchestrator.lab.calibration import calibrate as measured
    from orchestrator.lab.calibration import findings, to_toml

    path = out or calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    options["target"] = str(target_folder(options["target"]))
    console = Console(stderr=True)
    with console.status("Starting ...") as status:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        profile = measured(
            date=date, samples=SAMPLES, notice=lambda what: status.update(f"Measuring: {what} ..."), **options
        )
    path.write_text(to_toml(profile))
    show(findings(profile), as_json=False)
    say(f"Written to {path}. Use it with --pace {path}.")
