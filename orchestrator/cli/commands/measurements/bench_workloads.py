"""`launch-pipeline bench` with other workloads than a comparison: long prompts, an agent's turns, requests at once."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from orchestrator.cli.commands.measurements.bench_plan import GROWING, complain, fail, plan_of, prompts_of


def growth(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    from orchestrator.lab.bench.results.report import BenchProgress
    from orchestrator.lab.bench.workloads import prompt_length_report as length_report
    from orchestrator.lab.bench.workloads.prompt_length import LENGTHS, measure

    plan = plan_of(options, GROWING)
    with BenchProgress(len(plan.strategies) * len(LENGTHS)) as turns:
        figures, context = measure(plan, prompts_of(plan, path, limit), turns.set_total, turns.finished)
    if as_json:
        click.echo(json.dumps(length_report.to_json(figures, plan, context)))
    else:
        Console().print(length_report.table(figures, plan, context))
    if plot is not None:
        length_report.draw(figures, plot)


def reuse(
    conversation: int, path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    from orchestrator.lab.bench.results.report import BenchProgress, wide_console
    from orchestrator.lab.bench.workloads import prefix_reuse_report as reuse_report
    from orchestrator.lab.bench.workloads.prefix_reuse import measure

    if plot is not None:
        raise click.UsageError("--reuse draws no picture: leave --plot out.")
    plan = plan_of(options, "adaptive")
    prompts = prompts_of(plan, path, limit)
    with BenchProgress(conversation) as progress:
        turns, shape = measure(plan, conversation, prompts, progress.set_total, progress.finished)
    if as_json:
        click.echo(json.dumps(reuse_report.to_json(turns, shape, plan)))
    else:
        wide_console().print(reuse_report.table(turns, shape, plan))
    complain(reuse_report.invalid(turns))
    fail(reuse_report.failures(turns))


def concurrency(
    requests: str, path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    from orchestrator.lab.bench.results.report import BenchProgress
    from orchestrator.lab.bench.workloads import concurrency_report
    from orchestrator.lab.bench.workloads.concurrency import measure, parse_requests

    if plot is not None:
        raise click.UsageError("--requests draws no picture: leave --plot out.")
    counts = parse_requests(requests)
    plan = plan_of(options, GROWING)
    prompts = prompts_of(plan, path, limit)
    with BenchProgress((1 + len(plan.strategies)) * len(counts) + len(plan.draft_tokens)) as turns:
        figures = measure(plan, counts, prompts, turns.starting, turns.finished)
    if as_json:
        click.echo(json.dumps(concurrency_report.to_json(figures, plan)))
    else:
        Console().print(concurrency_report.table(figures, plan))
    fail(concurrency_report.failures(figures))
