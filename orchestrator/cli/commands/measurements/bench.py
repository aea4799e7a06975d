"""`launch-pipeline bench`: options to a plan, figures to tables, pictures and exit codes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.commands.measurements import bench_costs, bench_workloads
from orchestrator.cli.commands.measurements.bench_plan import GROWING, REPEATS, complain, fail, plan_of, prompts_of
from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.options import (
    draft_option,
    pace_option,
    pair_option,
    target_hosts_option,
    target_option,
    without_effect,
)
from orchestrator.cli.pipelines import print_notes
from orchestrator.lab.bench.forward_comparison.messages import LAYER_KINDS, ComparisonOrder, LayerKind
from orchestrator.lab.bench.plan import DEFAULT_DRAFT_TOKENS
from protocol.errors import PipelineError

if TYPE_CHECKING:
    from orchestrator.lab.bench.acceptance import ExaminedDrafter
    from orchestrator.lab.bench.measurement import BenchRequest, Measurement
    from orchestrator.lab.bench.plan import BenchPlan
    from orchestrator.lab.bench.prompts import BenchPrompt

_COMPARED = "ar,sd,ssd,adaptive"
_LIMIT = 11
"""Shipped messages of a comparison without --limit: one of each category."""


@click.command()
@pair_option
@target_option
@draft_option()
@click.option(
    "--prompts",
    "path",
    type=click.Path(path_type=Path),
    help='Lines of {"prompt": "..."} or {"turns": ["..."], "category": "..."}: the messages of a conversation. '
    "Default: messages of users; Python for a target without a chat template.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"So many prompts, taken evenly from the categories.  [default: {_LIMIT} of the messages, else all]",
)
@click.option(
    "--temperature",
    type=float,
    multiple=True,
    help="May be given several times.  [default: 0 and 1; with --same-model 0.8]",
)
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help=f"[default: 1; with --growth, --requests or --reuse {REPEATS}; with --forward {ComparisonOrder().samples}]",
)
@click.option(
    "--draft-tokens",
    default=DEFAULT_DRAFT_TOKENS,
    show_default=True,
    help="Every K of mlx-lm's speculation, of sd and of ssd; 0 leaves the former out and takes one K for the others.",
)
@click.option(
    "--strategies",
    "--mode",
    help=f"Ours, by their names or by autoregressive, speculative, prompt-lookup.  [default: {_COMPARED}; with "
    f"--growth or --requests {GROWING}]",
)
@click.option("--same-model", is_flag=True, help="The target is its own draft.")
@click.option(
    "--no-controls",
    "controls",
    flag_value=False,
    default=True,
    help="Leave out adaptive without prompt lookup, prompt lookup alone, a draft that guesses blindly, and mlx-lm on "
    "the cores of our target.",
)
@click.option(
    "--verification",
    type=click.Choice(["coupled", "rejection"]),
    default="coupled",
    show_default=True,
    help="rejection: also sd and ssd with rejection sampling, above temperature 0.",
)
@click.option(
    "--rivals",
    metavar="NAME[,NAME...]",
    help="Also other software: mlx-dspark, whose first use installs about 1 GB in an environment of its own; "
    "llama.cpp, if llama-server is on the PATH.",
)
@click.option(
    "--drafters",
    metavar="FOLDER[,FOLDER...]",
    help="Also these drafts, of any kind, under the same strategies, and what each guesses alone.",
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
@click.option(
    "--forward", is_flag=True, help="Instead: forwards of random models beside mlx-lm's own, by kind of layer."
)
@click.option(
    "--kind", type=click.Choice(LAYER_KINDS), multiple=True, help="With --forward. May be given several times."
)
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Also write a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@stays_awake
def bench(
    growth: bool,
    requests: str | None,
    micro: bool,
    forward: bool,
    kind: tuple[LayerKind, ...],
    reuse: bool,
    turns: int,
    **options: Any,
) -> None:
    """Compare our strategies with mlx-lm's own decoding, and every token with the target's own.

    Contenders take turns, one generation at a time. Ends with exit code 1 if a token is wrong. Ratios are to mlx-lm at
    its best: on all cores, plain or with the best K. Few contenders save time: --strategies, --draft-tokens,
    --no-controls.

    \b
    launch-pipeline bench
    launch-pipeline bench --pair demo --limit 2 --draft-tokens 2-4 --temperature 0
    launch-pipeline bench --mode speculative,adaptive --same-model
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b --pair demo --verification rejection --plot m4.png
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b@4 --replay
    launch-pipeline bench --prompts prompts.jsonl --json > figures.json
    launch-pipeline bench --strategies ar,adaptive --draft-tokens 1,2 --no-controls --temperature 0
    launch-pipeline bench --rivals mlx-dspark,llama.cpp --temperature 0
    launch-pipeline bench --growth --max-tokens 32
    launch-pipeline bench --requests 1,4 --draft-tokens 2 --temperature 0
    launch-pipeline bench --reuse --turns 50 --repeats 1
    launch-pipeline bench --forward --kind delta --kind windows
    launch-pipeline bench --link-delay 0.3,2,10,50 --link-loss 0.01 --strategies ar,adaptive --draft-tokens 0
    """
    print_notes(without_effect({}))
    if growth or requests or reuse or options["link_delay"]:
        _refuse_slow_motion(options["pace"])
    if micro:
        bench_costs.micro(options["target"], options["draft"], options["as_json"])
    elif forward:
        bench_costs.forwards(kind or LAYER_KINDS, options["repeats"], options["as_json"])
    elif reuse:
        bench_workloads.reuse(turns, **options)
    elif growth:
        bench_workloads.growth(**options)
    elif requests:
        bench_workloads.concurrency(requests, **options)
    else:
        _compare(**options)


def _compare(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    from orchestrator.lab.bench.results import acceptance_report, report
    from orchestrator.lab.bench.results.figures import rows, rows_by_category
    from orchestrator.lab.bench.results.plot import draw, draw_distances
    from orchestrator.lab.bench.trials import run

    plan = plan_of(options, _COMPARED, repeats=1, temperature=())
    texts = prompts_of(plan, path, limit or (_LIMIT if path is None else None))
    requests = _requests(plan, texts)
    recorded = _recorded(plan, requests) if plan.replays else None
    absent: dict[str, str] = {}
    notes: list[str] = []
    with report.BenchProgress(1) as turns:
        progress = turns.starting, turns.set_total, turns.finished
        measurements, names = run(plan, requests, *progress, absent.__setitem__, notes.append, recorded)
    print_notes(notes)
    figures, by_category = rows(measurements, names), rows_by_category(measurements, names)
    console = report.wide_console()
    if not as_json:
        console.print(report.tables(figures, plan, len(texts), by_category, absent))
    drafters = _examined(plan, requests, measurements) if plan.drafters else []
    if as_json:
        found = report.to_json(figures, plan, len(texts), by_category, absent)
        click.echo(json.dumps(found | {"drafters": acceptance_report.to_json(drafters)}))
    elif drafters:
        console.print(acceptance_report.table(drafters))
    if plot is not None:
        subtitle = f"{plan.pace or 'this machine'}, {len(texts)} prompts, {plan.max_tokens} tokens"
        if plan.links:
            draw_distances(figures, plan.strategies, plan.links, subtitle, plot)
        else:
            draw(figures, subtitle, plot)
    complain(report.invalid(figures))
    fail(report.failures(figures))


def _examined(
    plan: "BenchPlan", requests: "Sequence[BenchRequest]", measurements: "Sequence[Measurement]"
) -> "list[ExaminedDrafter]":
    """What the drafts guess of the texts that were measured, each alone, under a progress bar. None if that fails: the
    speeds are measured by then and must not be lost."""
    from orchestrator.lab.bench.acceptance import examined, written_texts
    from orchestrator.lab.bench.results.report import BenchProgress
    from orchestrator.machine.hardware import usable_cores

    with BenchProgress(1) as progress:

        def show(name: str, _: int, total: int) -> None:
            progress.set_total(total)
            progress.finished(f"{name} alone")

        try:
            written = written_texts(measurements, requests)
            return examined(plan.models(), plan.drafters, written, show, len(usable_cores()))
        except PipelineError as error:
            complain([f"There is no table of guesses: {error}"])
            return []


def _refuse_slow_motion(pace: str | None) -> None:
    from orchestrator.machine.profiles.device_profiles import load_profile

    if pace is not None and load_profile(pace).slow_motion != 1.0:
        raise click.UsageError(f"Only a comparison without links counts in the time of {pace}: leave the @ out.")


def _requests(plan: "BenchPlan", prompts: "Sequence[BenchPrompt]") -> "list[BenchRequest]":
    """Every turn of the prompts; under a progress bar the target answers those before others."""
    from orchestrator.lab.bench.results.report import BenchProgress
    from orchestrator.lab.bench.trials import count_answers, requests_of

    if not count_answers(prompts):
        return requests_of(prompts, plan)
    with BenchProgress(count_answers(prompts)) as progress:
        progress.starting("the target, to answer the first turns")
        return requests_of(prompts, plan, lambda: progress.finished("Answering the first turns"))


def _recorded(plan: "BenchPlan", requests: "Sequence[BenchRequest]") -> Path:
    """The recorded texts of the plan, made under a progress bar if they are absent."""
    from orchestrator.lab.bench.recording import distinct_tasks, recorded
    from orchestrator.lab.bench.results.report import BenchProgress

    with BenchProgress(len(distinct_tasks(plan, requests))) as progress:
        progress.starting("the target, to record its texts")
        return recorded(plan, requests, progress.finished)
