"""`launch-pipeline bench`: a measurement a subcommand, figures to tables, pictures and exit codes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.help import BriefCommand, Group
from orchestrator.cli.idle_sleep import stays_awake
from orchestrator.cli.pipeline_options import (
    Destination,
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
"""Shipped messages of a comparison without --limit: one of each category."""
_REPEATS = 3
"""Of a measurement whose prompts are few; a comparison repeats with other prompts instead."""
_DEFAULT = "strategies"
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Measurements(Group):
    """Options without a measurement's name are those of `strategies`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.commands[_DEFAULT].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def _joined(*decorators: Decorator) -> Decorator:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _strategies_option(default: str) -> Decorator:
    return click.option("--strategies", default=default, show_default=True, help="Ours, by their names.")


def _repeats_option(default: int) -> Decorator:
    return click.option("--repeats", type=click.IntRange(min=1), default=default, show_default=True)


def _one_temperature(context: click.Context, option: click.Parameter, given: tuple[float, ...]) -> tuple[float, ...]:
    if len(given) > 1:
        raise click.BadParameter("this measures at one temperature: run it once for each.", context, option)
    return given or (0.0,)


_temperature_option = click.option(
    "--temperature", type=float, multiple=True, callback=_one_temperature, help="[default: 0]"
)


_requests_options = _joined(
    pair_option,
    target_option,
    draft_option(),
    click.option(
        "--prompts",
        "path",
        type=click.Path(path_type=Path),
        help='Lines of {"prompt": "..."} or {"turns": ["..."], "category": "..."}: the messages of a conversation. '
        "Default: messages of users; Python for a target without a chat template.",
    ),
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        help="So many prompts, taken evenly from the categories.  [default: "
        f"{_LIMIT} of the messages in a comparison, else all]",
    ),
    click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True),
    pace_option,
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


@click.group(cls=Measurements)
def bench() -> None:
    """Measure this machine's speed: our strategies beside mlx-lm's own decoding, or what COMMAND names.

    Without a COMMAND: strategies, whose options these are.

    \b
    launch-pipeline bench
    launch-pipeline bench --prompts prompts.jsonl --json > figures.json
    launch-pipeline bench reuse
    """


@bench.command(
    cls=BriefCommand,
    brief="pair target draft prompts limit max-tokens temperature strategies draft-tokens plot json",
)
@_requests_options
@click.option("--temperature", type=float, multiple=True, help="May be given several times.  [default: 0 and 1]")
@_repeats_option(1)
@click.option(
    "--draft-tokens",
    default=DEFAULT_DRAFT_TOKENS,
    show_default=True,
    help="Every K of mlx-lm's speculation, of sd and of ssd; 0 leaves the former out and takes one K for the others.",
)
@_strategies_option("ar,sd,ssd,adaptive")
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
@click.option("--plot", metavar="FILE", type=Destination(".png"), help="Also write a PNG.")
@_json_option
@stays_awake
def strategies(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Compare our strategies with mlx-lm's own decoding, and every token with the target's own.

    Contenders take turns, one generation at a time. Ends with exit code 1 if a token is wrong. Ratios are to mlx-lm at
    its best, plain or with the best K. Beside adaptive stand its parts, and what the draft and prompt lookup give it.
    Few contenders save time: --strategies, --draft-tokens.

    \b
    launch-pipeline bench strategies
    launch-pipeline bench --pair demo --limit 2 --draft-tokens 2-4 --temperature 0
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b --pair demo --plot m4.png
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b@4 --replay
    launch-pipeline bench --strategies ar,adaptive --draft-tokens 1,2
    launch-pipeline bench --rivals llama.cpp --temperature 0
    """
    from orchestrator.lab.bench.strategies import measure

    print_notes(without_effect())
    plan = _plan(options)
    prompts = _prompts(plan, path, limit or (_LIMIT if path is None else None))
    with ProgressBar() as bar:
        found = measure(plan, prompts, bar)
    show(found, as_json, plot)


@bench.command()
@_requests_options
@_temperature_option
@_repeats_option(_REPEATS)
@_json_option
@stays_awake
def reuse(path: Path | None, limit: int | None, as_json: bool, **options: Any) -> None:
    """Measure the first token of an agent's turns, with KV kept and without.

    \b
    launch-pipeline bench reuse --repeats 1
    """
    from orchestrator.lab.bench.reuse import measure

    print_notes(without_effect())
    plan = _plan({**options, "strategies": "adaptive"})
    prompts = _prompts(plan, path, limit)
    with ProgressBar() as bar:
        found = measure(plan, prompts, bar)
    show(found, as_json)


def _plan(options: dict[str, Any]) -> "BenchPlan":
    """Only a comparison can be in slow motion."""
    from orchestrator.lab.bench.plan import BenchPlan
    from orchestrator.machine.profiles.device_profiles import load_profile

    pace = options["pace"]
    if pace is not None and "replay" not in options and load_profile(pace).slow_motion != 1.0:
        raise click.UsageError(f"Only a comparison counts in the time of {pace}: leave the @ out.")
    return BenchPlan.of(**{"draft_tokens": "0", **options})


def _prompts(plan: "BenchPlan", path: Path | None, limit: int | None) -> "list[BenchPrompt]":
    """The file's prompts, or the shipped ones for the target, whose models are fetched if need be."""
    from orchestrator.lab.bench.prompts import read_prompts
    from orchestrator.text.chat_template import own_template

    with ConversionBar(quiet=False) as bar:
        models = plan.models(bar)
    print_notes([models.note])
    return read_prompts(path, limit, chat=own_template(str(models.target)) is not None)
