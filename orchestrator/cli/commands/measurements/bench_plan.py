"""What the workloads of `launch-pipeline bench` share: the plan of the options, its prompts, and how it ends."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.conversion_bar import ConversionBar
from orchestrator.cli.pipelines import print_notes

if TYPE_CHECKING:
    from orchestrator.lab.bench.plan import BenchPlan
    from orchestrator.lab.bench.prompts import BenchPrompt

REPEATS = 3
"""Of a workload whose prompts are few; a comparison repeats with other prompts instead."""
GROWING = "ar,adaptive"
"""Strategies of a workload without --strategies."""
_FAILED = 1


def plan_of(
    options: dict[str, Any], strategies: str, repeats: int = REPEATS, temperature: Sequence[float] = (0.0,)
) -> "BenchPlan":
    """The options, with these where they were not given; no temperature is the plan's own default."""
    from orchestrator.lab.bench.plan import BenchPlan

    defaults = {"strategies": strategies, "repeats": repeats, "temperature": temperature}
    return BenchPlan.of(**{**options, **{name: options[name] or default for name, default in defaults.items()}})


def prompts_of(plan: "BenchPlan", path: Path | None, limit: int | None) -> "list[BenchPrompt]":
    """The file's prompts, or the shipped ones for the target, whose models are fetched if need be."""
    from orchestrator.api.chat_prompts import own_template
    from orchestrator.lab.bench.prompts import read_prompts

    with ConversionBar(quiet=False) as bar:
        models = plan.models(bar)
    print_notes([models.note])
    return read_prompts(path, limit, chat=own_template(str(models.target)) is not None)


def fail(sentences: Sequence[str]) -> None:
    """End with exit code 1 if there are any."""
    complain(sentences)
    if sentences:
        sys.exit(_FAILED)


def complain(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        click.echo(f"Error: {sentence}", err=True)
