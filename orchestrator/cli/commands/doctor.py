"""`launch-pipeline doctor`: findings about this machine to text and an exit code."""

import sys
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from orchestrator.cli import printing
from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import option, without_effect
from orchestrator.cli.pipelines import ConversionBar, print_notes
from orchestrator.cli.sentences import say
from protocol.ineffective import Ineffective

_FAILED = 1


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--neural-engine", is_flag=True, help="Examine instead whether a draft can run on the Neural Engine.")
@option(
    "--target",
    Ineffective("the Neural Engine is examined without a target", neural_engine=True),
    metavar="MODEL",
    help="Load this target instead, and say what it verifies at a time.",
)
@click.option(
    "--draft",
    metavar="MODEL",
    help="What kind of draft it is; with --target, is it read rightly? With --neural-engine: which one.",
)
@stays_awake
def doctor(as_json: bool, neural_engine: bool, target: str | None, draft: str | None) -> None:
    """Show what this machine has, what will be used, and the next step for what is missing.

    \b
    launch-pipeline doctor
    launch-pipeline doctor --json
    launch-pipeline doctor --target MODEL
    launch-pipeline doctor --draft MODEL --target MODEL
    """
    from orchestrator.runtime.doctor import examine
    from orchestrator.runtime.model_checks import draft_findings, target_finding

    print_notes(without_effect())
    named = _named(target, "target"), _named(draft, "draft")
    if any(named) and not neural_engine:
        findings = []
        with ConversionBar(as_json) as bar:
            if named[0] is not None:
                findings.append(target_finding(named[0], bar))
            if named[1] is not None:
                findings += draft_findings(named[1], named[0], bar)
    else:
        findings = _neural_engine(draft, quiet=as_json) if neural_engine else examine()
    if as_json:
        click.echo(msgspec.json.encode(findings).decode())
    else:
        printing.print_whole(printing.findings_table(findings))
    if any(finding.status == "fail" for finding in findings):
        sys.exit(_FAILED)


def _named(model: str | None, option: str) -> str | None:
    """The model that a flag names. One in the configuration is for the commands that use one: without a flag this
    machine is examined."""
    given = click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE
    return model if given else None


def _neural_engine(draft: str | None, quiet: bool) -> Any:
    """The findings of an examination that takes minutes; its stages are shown on stderr."""
    from orchestrator.runtime.doctor import neural_engine
    from orchestrator.runtime.model_checks import examined

    if sys.platform != "darwin":
        return neural_engine()

    def told(words: str) -> None:
        if not quiet:
            say(f"Examining: {words}", err=True)

    with ConversionBar(quiet) as bar:
        return examined(draft, on_progress=bar, on_stage=told)
