"""`launch-pipeline plan`: options to scenarios, predictions to text."""

from contextlib import nullcontext

import click
from rich.console import Console

from orchestrator.cli.printing import show
from orchestrator.cli.sentences import say
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.plan import COOL, GREEDY, SAMPLED, Scenario, by_acceptance, plan_findings, predict
from orchestrator.machine.profiles.device_profiles import calibration_file, load_profile

_DEFAULT_PROFILE = "m4-16gb-qwen2.5-3b"


@click.command()
@click.option(
    "--pace",
    "profile",
    metavar="PROFILE",
    help=f"Device and pair of models.  [default: what `calibrate` has measured here, else {_DEFAULT_PROFILE}]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0, 100.0),
    multiple=True,
    help="May be given several times.  [default: 0 and 1]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(profile: str | None, temperature: tuple[float, ...], as_json: bool) -> None:
    """Predict tokens/s on a device, without it and without models.

    The real state machine and the real workers run without models in virtual time. By default the draft
    guesses as the demo pair's does on Python code.

    \b
    launch-pipeline plan --pace m4-pro-gemma3-12b-bf16
    launch-pipeline plan --temperature 0
    launch-pipeline calibrate && launch-pipeline plan
    """
    measured = calibration_file()
    device = load_profile(profile or (str(measured) if measured.is_file() else _DEFAULT_PROFILE))
    scenarios = []
    for each in temperature or (0.0, 1.0):
        acceptance = GREEDY if each == 0 else COOL if each < 1 else SAMPLED
        scenarios.append(Scenario(devices=Devices.of(device), acceptance=acceptance, temperature=each))
    with nullcontext() if as_json else Console(stderr=True).status("Simulating ..."):
        findings = plan_findings(device, [(one, predict(one), by_acceptance(one)) for one in scenarios])
    if not as_json:
        say(f"{findings.title}\n")
    show(findings, as_json)
