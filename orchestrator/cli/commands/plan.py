"""`launch-pipeline plan`: options to scenarios, predictions to text."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.help import BriefCommand
from orchestrator.cli.pipeline_options import Destination, given_only, speculation_options
from orchestrator.cli.report import show
from orchestrator.cli.sentences import say
from orchestrator.lab.simulate.acceptance import AcceptanceModel
from orchestrator.lab.simulate.devices import Devices, Wire, Wires
from orchestrator.lab.simulate.prediction.plan import GREEDY, SAMPLED, Scenario, pays_from, predict
from orchestrator.lab.simulate.prediction.sweep import (
    DRAFTERS,
    SWEEPS,
    plan_findings,
    sweep,
    sweep_findings,
    with_draft_delay,
    with_draft_step,
    with_drafter,
    with_target_step,
)
from orchestrator.lab.simulate.trace import RecordedRequest, fit, read_trace
from orchestrator.machine.profiles.device_profiles import DeviceProfile, calibration_file, load_profile
from protocol.errors import InputError
from protocol.messages.base import Level

_DEFAULT_PROFILE = "m4-16gb-qwen2.5-3b"
_SPECULATION = ("draft_tokens", "draft_width", "draft_fan", "max_verify", "fan_budget", "lookup", "fallback")
_SHARE = click.FloatRange(0.0, 1.0)
_MILLISECONDS = click.FloatRange(0.0, min_open=True)


@click.command(
    cls=BriefCommand,
    brief="pace this-mac trace temperature accept drafter draft-ms target-ms draft-tokens requests plot json",
)
@click.option("--pace", "profile", metavar="PROFILE", help=f"Device and pair of models.  [default: {_DEFAULT_PROFILE}]")
@click.option("--this-mac", is_flag=True, help="The machine that `launch-pipeline calibrate` measured.")
@click.option("--trace", type=click.Path(path_type=Path), help="Replay what `generate --record FILE` wrote.")
@click.option(
    "--temperature",
    type=click.FloatRange(0.0, 100.0),
    multiple=True,
    help="May be given several times.  [default: 0 and 1]",
)
@click.option("--accept", type=_SHARE, help="How often the draft's best guess is right.")
@click.option("--exponent", type=click.FloatRange(0.01, 20.0), help="How fast further guesses catch the rest.")
@click.option("--spread", type=click.FloatRange(0.0, 10.0), help="How much positions differ, in log odds.")
@click.option("--independent", type=_SHARE, help="How often two independent draws agree (mlx-lm above temperature 0).")
@click.option("--drafter", type=click.Choice(list(DRAFTERS)), help="A trained drafter of this kind, as published.")
@click.option("--draft-ms", type=_MILLISECONDS, help="Another draft: milliseconds of one step.")
@click.option("--target-ms", type=_MILLISECONDS, help="Another target: milliseconds of one forward.")
@click.option(
    "--level",
    type=click.Choice(get_args(Level)),
    default="tree",
    show_default=True,
    help="What one forward of the target verifies: trees, one path (chain), or no guesses (plain).",
)
@click.option("--draft-delay", type=click.FloatRange(0.0), help="Milliseconds to a draft elsewhere, each way.")
@click.option(
    "--hop", type=click.FloatRange(0.0), default=0.3, show_default=True, help="Milliseconds of messages a round."
)
@speculation_options(*_SPECULATION)
@click.option("--tokens", type=click.IntRange(2, 100_000), default=256, show_default=True, help="A request.")
@click.option("--requests", type=click.IntRange(1, 1000), default=3, show_default=True, help="Without --trace.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--sweep", "swept", type=click.Choice(list(SWEEPS)), metavar="WHAT", help=f"Change one thing: {', '.join(SWEEPS)}."
)
@click.option("--values", help="Comma-separated values of the sweep.")
@click.option("--plot", type=Destination(".png"), help="Write a picture (PNG).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(swept: str | None, values: str | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Predict tokens/s on a device, without it and without models.

    The real state machine and the real workers run without models in virtual time. By default the draft
    guesses as the demo pair's does on Python code.

    \b
    launch-pipeline plan --pace m4-pro-gemma3-12b-bf16
    launch-pipeline plan --this-mac
    launch-pipeline plan --accept 0.6 --draft-ms 4 --temperature 0
    launch-pipeline plan --drafter eagle3
    launch-pipeline plan --sweep draft-delay --values 0.3,2,10,50 --plot delay.png
    launch-pipeline generate "import os" --record run.jsonl
    launch-pipeline plan --trace run.jsonl
    """
    profile = _profile(options)
    drafter = None if options["drafter"] is None else DRAFTERS[options["drafter"]]
    if drafter is not None and options["trace"] is not None:
        raise click.UsageError("A recorded run has its own draft: leave out --trace or --drafter.")
    scenarios = list(_scenarios(profile, options))
    numbers = _numbers(values)
    if values is not None and swept is None:
        raise click.UsageError("--values says what --sweep is to try: give --sweep too.")
    if drafter is not None:
        say(f"Acceptance of {options['drafter']}: {drafter.source}.", err=True)
    with nullcontext() if as_json else Console(stderr=True).status("Simulating ..."):
        if swept is None:
            findings = plan_findings(profile, [(one, predict(one), pays_from(one)) for one in scenarios])
        else:
            findings = sweep_findings(profile, swept, [(one, list(sweep(one, swept, numbers))) for one in scenarios])
    if not as_json:
        say(f"{findings.title}\n")
    show(findings, as_json, plot)


def _profile(options: dict[str, Any]) -> DeviceProfile:
    named, this_mac = options["profile"], options["this_mac"]
    if named is not None and this_mac:
        raise click.UsageError("--pace and --this-mac are two answers to one question: give one of them.")
    if this_mac and not calibration_file().is_file():
        raise InputError("This machine was not measured yet: run `launch-pipeline calibrate` first.")
    return load_profile(str(calibration_file()) if this_mac else named or _DEFAULT_PROFILE)


def _scenarios(profile: DeviceProfile, options: dict[str, Any]) -> Iterator[Scenario]:
    """A scenario for each temperature."""
    for temperature, recorded in _temperatures(options):
        scenario = Scenario(
            devices=Devices.of(profile),
            wires=Wires(target=Wire(delay=options["hop"] / 2000)),
            acceptance=_acceptance(temperature, recorded, options),
            recorded=recorded,
            temperature=temperature,
            level=options["level"],
            options=PipelineSettings().changed(**given_only({name: options[name] for name in _SPECULATION})).options,
            tokens=options["tokens"],
            requests=options["requests"],
            seed=options["seed"],
        )
        if options["drafter"] is not None:
            scenario = with_drafter(scenario, options["drafter"])
            scenario = replace(scenario, acceptance=_given(scenario.acceptance, options))
        changes = (("draft_ms", with_draft_step), ("target_ms", with_target_step), ("draft_delay", with_draft_delay))
        for name, change in changes:
            if options[name] is not None:
                scenario = change(scenario, options[name])
        yield scenario


def _temperatures(options: dict[str, Any]) -> Iterator[tuple[float, tuple[RecordedRequest, ...]]]:
    """Those of the recorded run, or those that were asked for."""
    if options["trace"] is None:
        yield from ((temperature, ()) for temperature in options["temperature"] or (0.0, 1.0))
        return
    if options["accept"] is not None or options["temperature"]:
        raise click.UsageError("A recorded run has its own acceptance and temperature: leave out --trace or those.")
    recorded = sorted(read_trace(options["trace"]), key=lambda one: one.temperature)
    for temperature, group in groupby(recorded, key=lambda one: one.temperature):
        yield temperature, tuple(group)


def _acceptance(temperature: float, recorded: Sequence[RecordedRequest], options: dict[str, Any]) -> AcceptanceModel:
    known = fit(recorded) if recorded else SAMPLED if temperature > 0 else GREEDY
    return _given(known, options)


def _given(acceptance: AcceptanceModel, options: dict[str, Any]) -> AcceptanceModel:
    """The acceptance with what the user says of it."""
    names = ("accept", "exponent", "spread", "independent")
    return replace(acceptance, **{name: options[name] for name in names if options[name] is not None})


def _numbers(values: str | None) -> list[float]:
    try:
        return [float(value) for value in values.split(",")] if values else []
    except ValueError as error:
        raise click.UsageError(f"--values takes numbers separated by commas, not {values!r}.") from error
