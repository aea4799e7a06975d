"""`launch-pipeline bench`: options to a plan, figures to tables, pictures and exit codes."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from orchestrator.cli.options import (
    draft_option,
    pace_option,
    pair_option,
    target_hosts_option,
    target_option,
    without_effect,
)
from orchestrator.cli.pipelines import print_notes

if TYPE_CHECKING:
    from orchestrator.tools.bench.trials import BenchPlan

_FAILED = 1
_GROWING = "ar,adaptive"


@click.command()
@pair_option
@target_option
@draft_option()
@click.option("--prompts", "path", type=click.Path(path_type=Path), help='Lines of {"prompt": "..."}. Default: Python.')
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many prompts.")
@click.option("--temperature", type=float, multiple=True, help="May be given several times.  [default: 0 and 1]")
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--draft-tokens", default="1-8", show_default=True, help="Those of mlx-lm; 0 leaves its speculation out.")
@click.option("--strategies", help=f"Ours.  [default: ar,sd,ssd,adaptive; with --growth or --requests {_GROWING}]")
@click.option("--random-draft", is_flag=True, help="Also adaptive with a draft that guesses blindly.")
@click.option(
    "--verification",
    type=click.Choice(["coupled", "rejection"]),
    default="coupled",
    show_default=True,
    help="rejection: also sd and ssd with rejection sampling, above temperature 0.",
)
@click.option("--link-delay", metavar="MS[,MS...]", help="Also with the draft so far away, one way.")
@click.option(
    "--link-loss", type=click.FloatRange(0.0, 0.5), default=0.0, show_default=True, help="Share of packets lost there."
)
@target_hosts_option
@pace_option
@click.option("--replay", is_flag=True, help="With --pace, for a slow target: record its texts once, then replay them.")
@click.option("--growth", is_flag=True, help="Instead: longer and longer prompts.")
@click.option("--requests", metavar="N[,N...]", help="Instead: so many requests at once, for instance 1,2,4,8.")
@click.option("--reuse", is_flag=True, help="Instead: the first token of an agent's turns, with KV kept and without.")
@click.option("--turns", type=click.IntRange(min=2), default=50, show_default=True, help="With --reuse.")
@click.option("--micro", is_flag=True, help="Instead: what single steps of the workers take, each alone.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Also write a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def bench(growth: bool, requests: str | None, micro: bool, reuse: bool, turns: int, **options: Any) -> None:
    """Compare our strategies with mlx-lm's own decoding, and every token with the target's own.

    Contenders take turns, one generation at a time. Ends with exit code 1 if a token is wrong.

    \b
    launch-pipeline bench
    launch-pipeline bench --limit 2 --repeats 1 --draft-tokens 2-4 --temperature 0
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b --verification rejection --plot m4.png
    launch-pipeline bench --prompts prompts.jsonl --random-draft --json > figures.json
    launch-pipeline bench --growth --max-tokens 32
    launch-pipeline bench --requests 1,4 --draft-tokens 2 --temperature 0
    launch-pipeline bench --reuse --turns 50 --repeats 1
    launch-pipeline bench --link-delay 0.3,2,10,50 --link-loss 0.01 --strategies ar,adaptive --draft-tokens 0
    """
    print_notes(without_effect({}))
    if micro:
        _micro(options["as_json"])
    elif reuse:
        _reuse(turns, **options)
    elif growth:
        _growth(**options)
    elif requests:
        _concurrency(requests, **options)
    else:
        _compare(**options)


def _compare(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    from orchestrator.tools.bench import report
    from orchestrator.tools.bench.figures import rows
    from orchestrator.tools.bench.plot import draw, draw_distances
    from orchestrator.tools.bench.prompts import read_prompts
    from orchestrator.tools.bench.trials import BenchPlan, run

    plan = BenchPlan.of(**_with_strategies(options, "ar,sd,ssd,adaptive"))
    texts = read_prompts(path, limit)
    recorded = _recorded(plan, texts) if plan.replays else None
    with report.BenchProgress(plan.generations(len(texts))) as turns:
        measurements, names = run(plan, texts, turns.starting, turns.finished, recorded)
    figures = rows(measurements, names)
    if as_json:
        click.echo(json.dumps(report.to_json(figures, plan, len(texts))))
    else:
        report.wide_console().print(report.tables(figures, plan, len(texts)))
    if plot is not None:
        subtitle = f"{plan.pace or 'this machine'}, {len(texts)} prompts, {plan.max_tokens} tokens"
        if plan.links:
            draw_distances(figures, plan.strategies, plan.links, subtitle, plot)
        else:
            draw(figures, subtitle, plot)
    _complain(report.invalid(figures))
    wrong = report.failures(figures)
    _complain(wrong)
    if wrong:
        sys.exit(_FAILED)


def _growth(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    from orchestrator.tools.bench.prompts import read_prompts
    from orchestrator.tools.bench.report import BenchProgress
    from orchestrator.tools.bench.trials import BenchPlan
    from orchestrator.tools.bench.workloads import prompt_length_report as length_report
    from orchestrator.tools.bench.workloads.prompt_length import LENGTHS, measure

    plan = BenchPlan.of(**_with_strategies({**options, "temperature": options["temperature"] or (0.0,)}, _GROWING))
    with BenchProgress(len(plan.strategies) * len(LENGTHS)) as turns:
        figures, context = measure(plan, read_prompts(path, limit), turns.set_total, turns.finished)
    if as_json:
        click.echo(json.dumps(length_report.to_json(figures, plan, context)))
    else:
        Console().print(length_report.table(figures, plan, context))
    if plot is not None:
        length_report.draw(figures, plot)


def _reuse(
    conversation: int, path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    from orchestrator.tools.bench.prompts import read_prompts
    from orchestrator.tools.bench.report import BenchProgress, wide_console
    from orchestrator.tools.bench.trials import BenchPlan
    from orchestrator.tools.bench.workloads import prefix_reuse_report as reuse_report
    from orchestrator.tools.bench.workloads.prefix_reuse import measure

    if plot is not None:
        raise click.UsageError("--reuse draws no picture: leave --plot out.")
    plan = BenchPlan.of(**_with_strategies({**options, "temperature": options["temperature"] or (0.0,)}, "adaptive"))
    with BenchProgress(conversation) as progress:
        turns, shape = measure(plan, conversation, read_prompts(path, limit), progress.set_total, progress.finished)
    if as_json:
        click.echo(json.dumps(reuse_report.to_json(turns, shape, plan)))
    else:
        wide_console().print(reuse_report.table(turns, shape, plan))
    _complain(reuse_report.invalid(turns))
    wrong = reuse_report.failures(turns)
    _complain(wrong)
    if wrong:
        sys.exit(_FAILED)


def _concurrency(
    requests: str, path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    from orchestrator.tools.bench.prompts import read_prompts
    from orchestrator.tools.bench.report import BenchProgress
    from orchestrator.tools.bench.trials import BenchPlan
    from orchestrator.tools.bench.workloads import concurrency_report
    from orchestrator.tools.bench.workloads.concurrency import measure, parse_requests

    if plot is not None:
        raise click.UsageError("--requests draws no picture: leave --plot out.")
    counts = parse_requests(requests)
    plan = BenchPlan.of(**_with_strategies({**options, "temperature": options["temperature"] or (0.0,)}, _GROWING))
    with BenchProgress((1 + len(plan.strategies)) * len(counts) + len(plan.draft_tokens)) as turns:
        figures = measure(plan, counts, read_prompts(path, limit), turns.starting, turns.finished)
    if as_json:
        click.echo(json.dumps(concurrency_report.to_json(figures, plan)))
    else:
        Console().print(concurrency_report.table(figures, plan))
    wrong = concurrency_report.failures(figures)
    _complain(wrong)
    if wrong:
        sys.exit(_FAILED)


def _micro(as_json: bool) -> None:
    from orchestrator.tools.bench import micro

    figures = micro.measured()
    click.echo(json.dumps(micro.to_json(figures))) if as_json else Console().print(micro.table(figures))


def _with_strategies(options: dict[str, Any], default: str) -> dict[str, Any]:
    return {**options, "strategies": options["strategies"] or default}


def _recorded(plan: "BenchPlan", texts: Sequence[str]) -> Path:
    """The recorded texts of the plan, made under a progress bar if they are absent."""
    from orchestrator.tools.bench.recording import count, recorded
    from orchestrator.tools.bench.report import BenchProgress

    with BenchProgress(count(plan, len(texts))) as progress:
        progress.starting("the target, to record its texts")
        return recorded(plan, texts, progress.finished)


def _complain(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        click.echo(f"Error: {sentence}", err=True)
