"""`launch-pipeline bench`: options to a comparison, figures to tables and an exit code."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import (
    draft_option,
    option,
    pace_option,
    pair_option,
    target_option,
    without_effect,
)
from orchestrator.cli.pipelines import ConversionBar, print_notes
from orchestrator.cli.printing import show
from orchestrator.lab.bench.contender import LLAMA_CPP
from orchestrator.lab.bench.plan import DEFAULT_DRAFT_TOKENS
from orchestrator.lab.report import ProgressBar
from protocol.ineffective import Ineffective

if TYPE_CHECKING:
    from orchestrator.lab.bench.plan import BenchPlan
    from orchestrator.lab.bench.prompts import BenchPrompt

_LIMIT = 11
"""Shipped messages without --limit: one of each category."""


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
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@pace_option
@click.option("--temperature", type=float, multiple=True, help="May be given several times.  [default: 0 and 1]")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--draft-tokens",
    default=DEFAULT_DRAFT_TOKENS,
    show_default=True,
    help="Every K of mlx-lm's speculation, of sd and of ssd; 0 leaves the former out and takes one K for the others.",
)
@click.option("--strategies", default="ar,sd,ssd,adaptive", show_default=True, help="Ours, by their names.")
@click.option(
    "--rivals",
    type=click.Choice((LLAMA_CPP,)),
    help="Also other software: llama.cpp, if llama-server is on the PATH.",
)
@option(
    "--replay",
    Ineffective("without a pace the target takes its own time", pace=None),
    is_flag=True,
    help="With --pace, for a slow target: record its texts once, then replay them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@stays_awake
def bench(path: Path | None, limit: int | None, as_json: bool, **options: Any) -> None:
    """Compare our strategies with mlx-lm's own decoding, and every token with the target's own.

    Contenders take turns, one generation at a time. Ends with exit code 1 if a token is wrong. Ratios are to mlx-lm at
    its best, plain or with the best K. Beside adaptive stand its parts, and what the draft and prompt lookup give it.
    Few contenders save time: --strategies, --draft-tokens.

    \b
    launch-pipeline bench
    launch-pipeline bench --prompts prompts.jsonl --json > figures.json
    launch-pipeline bench --pair demo --limit 2 --draft-tokens 2-4 --temperature 0
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b --pair demo
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b@4 --replay
    launch-pipeline bench --strategies ar,adaptive --draft-tokens 1,2
    launch-pipeline bench --rivals llama.cpp --temperature 0
    """
    from orchestrator.lab.bench.plan import BenchPlan
    from orchestrator.lab.bench.strategies import measure

    print_notes(without_effect())
    plan = BenchPlan.of(**options)
    prompts = _prompts(plan, path, limit or (_LIMIT if path is None else None))
    with ProgressBar() as bar:
        found = measure(plan, prompts, bar)
    show(found, as_json)


def _prompts(plan: "BenchPlan", path: Path | None, limit: int | None) -> "list[BenchPrompt]":
    """The file's prompts, or the shipped ones for the target, whose models are fetched if need be."""
    from orchestrator.lab.bench.prompts import read_prompts
    from orchestrator.text.chat_template import own_template

    with ConversionBar(quiet=False) as bar:
        models = plan.models(bar)
    print_notes([models.note])
    return read_prompts(path, limit, chat=own_template(str(models.target)) is not None)
