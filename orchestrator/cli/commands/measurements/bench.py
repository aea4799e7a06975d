"""`launch-pipeline bench`: a measurement a subcommand, figures to tables, pictures and exit codes."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from orchestrator.cli.conversion_bar import ConversionBar
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

_COMPARED, _GROWING = "ar,sd,ssd,adaptive", "ar,adaptive"
_LIMIT = 11
"""Shipped messages of a comparison without --limit: one of each category."""
_REPEATS = 3
"""Of a measurement whose prompts are few; a comparison repeats with other prompts instead."""
_FAILED = 1
_DEFAULT = "strategies"
_OLD = {
    "--micro": "micro",
    "--forward": "forwards",
    "--reuse": "reuse",
    "--growth": "growth",
    "--requests": "requests",
    "--drafters": "drafters",
}
"""Options of 0.1 and the measurements that they chose, the strongest first. They go with the release after 0.2."""
_OLD_VALUES = ("--requests", "--drafters")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Measurements(click.Group):
    """Options without a measurement's name are those of `strategies`. Options that chose a measurement in 0.1 still
    do, with a warning."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = self._named(args)
        return super().parse_args(ctx, args)

    def _named(self, args: list[str]) -> list[str]:
        flags = {word.partition("=")[0] for word in args}
        chosen = next((flag for flag in _OLD if flag in flags), None)
        return [_DEFAULT, *args] if chosen is None else self._of_old_form(chosen, args)

    def _of_old_form(self, chosen: str, args: list[str]) -> list[str]:
        """The words of the new form. Options that this measurement does not use are left out and named, as before."""
        name = _OLD[chosen]
        own = _flags(self.commands[name])
        every = {flag: option for command in self.commands.values() for flag, option in _flags(command).items()}
        kept, values, unused = [name], [""], list[str]()
        words = iter(args)
        for word in words:
            flag, given, value = word.partition("=")
            takes = flag in _OLD_VALUES or (flag in every and not every[flag].is_flag)
            following = [next(words, "")] if takes and not given else []
            if flag == chosen:
                values = [value, *following]
            elif flag in _OLD or (flag in every and flag not in own):
                unused.append(flag)
            else:
                kept += [word, *following]
        measured = values[-1] or values[0]
        kept += measured.split(",") if chosen == "--drafters" else [measured] if measured else []
        print_notes(
            [
                f"Warning: `bench {chosen}` is `bench {name}` now; the next release no longer knows the option.",
                *(f"{flag} has no effect: `bench {name}` does not use it." for flag in unused),
            ]
        )
        return kept


def _flags(command: click.Command) -> dict[str, click.Option]:
    return {flag: each for each in command.params if isinstance(each, click.Option) for flag in each.opts}


def _joined(*decorators: Decorator) -> Decorator:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _strategies_option(default: str) -> Decorator:
    return click.option(
        "--strategies",
        "--mode",
        default=default,
        show_default=True,
        help="Ours, by their names or by autoregressive, speculative, prompt-lookup.",
    )


def _repeats_option(default: int) -> Decorator:
    return click.option("--repeats", type=click.IntRange(min=1), default=default, show_default=True)


def _temperature_option(default: str) -> Decorator:
    return click.option(
        "--temperature", type=float, multiple=True, help=f"May be given several times.  [default: {default}]"
    )


_models_options = _joined(pair_option, target_option, draft_option())
_same_model_option = click.option("--same-model", is_flag=True, help="The target is its own draft.")
_draft_tokens_option = click.option(
    "--draft-tokens",
    default=DEFAULT_DRAFT_TOKENS,
    show_default=True,
    help="Every K of mlx-lm's speculation, of sd and of ssd; 0 leaves the former out and takes one K for the others.",
)
_requests_options = _joined(
    _models_options,
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
    _same_model_option,
    pace_option,
)
_comparison_options = _joined(
    _requests_options,
    _temperature_option("0 and 1; with --same-model 0.8"),
    _repeats_option(1),
    _draft_tokens_option,
    _strategies_option(_COMPARED),
    click.option(
        "--no-controls",
        "controls",
        flag_value=False,
        default=True,
        help="Leave out adaptive without prompt lookup, prompt lookup alone, a draft that guesses blindly, and mlx-lm "
        "on the cores of our target.",
    ),
    click.option(
        "--verification",
        type=click.Choice(["coupled", "rejection"]),
        default="coupled",
        show_default=True,
        help="rejection: also sd and ssd with rejection sampling, above temperature 0.",
    ),
    click.option(
        "--rivals",
        metavar="NAME[,NAME...]",
        help="Also other software: mlx-dspark, whose first use installs about 1 GB in an environment of its own; "
        "llama.cpp, if llama-server is on the PATH.",
    ),
    click.option("--link-delay", metavar="MS[,MS...]", help="Also with the draft so far away, one way."),
    click.option(
        "--link-loss",
        type=click.FloatRange(0.0, 0.5),
        default=0.0,
        show_default=True,
        help="Share of packets lost there.",
    ),
    target_hosts_option,
    click.option(
        "--replay", is_flag=True, help="With --pace, for a slow target: record its texts once, then replay them."
    ),
)
_plot_option = click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Also write a PNG."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


@click.group(cls=Measurements)
def bench() -> None:
    """Measure this machine's speed: our strategies beside mlx-lm's own decoding, or what COMMAND names.

    Without a COMMAND: strategies, with its options.

    \b
    launch-pipeline bench
    launch-pipeline bench --prompts prompts.jsonl --json > figures.json
    launch-pipeline bench requests 1,4 --draft-tokens 2
    """


@bench.command()
@_comparison_options
@_plot_option
@_json_option
@stays_awake
def strategies(**options: Any) -> None:
    """Compare our strategies with mlx-lm's own decoding, and every token with the target's own.

    Contenders take turns, one generation at a time. Ends with exit code 1 if a token is wrong. Ratios are to mlx-lm at
    its best: on all cores, plain or with the best K. Few contenders save time: --strategies, --draft-tokens,
    --no-controls.

    \b
    launch-pipeline bench strategies
    launch-pipeline bench --pair demo --limit 2 --draft-tokens 2-4 --temperature 0
    launch-pipeline bench --mode speculative,adaptive --same-model
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b --pair demo --verification rejection --plot m4.png
    launch-pipeline bench --pace m4-16gb-qwen2.5-3b@4 --replay
    launch-pipeline bench --strategies ar,adaptive --draft-tokens 1,2 --no-controls --temperature 0
    launch-pipeline bench --rivals mlx-dspark,llama.cpp --temperature 0
    launch-pipeline bench --link-delay 0.3,2,10,50 --link-loss 0.01 --strategies ar,adaptive --draft-tokens 0
    """
    print_notes(without_effect({}))
    _compare(**options)


@bench.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)
@_comparison_options
@_plot_option
@_json_option
@stays_awake
def drafters(folders: tuple[str, ...], **options: Any) -> None:
    """Compare the drafts in these FOLDERs, of any kind, with the pair's own: the same strategies, and what each guesses
    alone.

    \b
    launch-pipeline bench drafters my-draft eagle3 --strategies adaptive --temperature 0
    """
    print_notes(without_effect({}))
    _compare(drafters=",".join(folders), **options)


@bench.command()
@_requests_options
@_temperature_option("0")
@_repeats_option(_REPEATS)
@_strategies_option(_GROWING)
@_plot_option
@_json_option
@stays_awake
def growth(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure speed and overhead behind longer and longer prompts.

    \b
    launch-pipeline bench growth --max-tokens 32 --plot growth.png
    """
    from orchestrator.lab.bench.results.report import BenchProgress
    from orchestrator.lab.bench.workloads import prompt_length_report as length_report
    from orchestrator.lab.bench.workloads.prompt_length import LENGTHS, measure

    print_notes(without_effect({}))
    plan = _plan(options)
    with BenchProgress(len(plan.strategies) * len(LENGTHS)) as turns:
        figures, context = measure(plan, _prompts(plan, path, limit), turns.set_total, turns.finished)
    if as_json:
        click.echo(json.dumps(length_report.to_json(figures, plan, context)))
    else:
        Console().print(length_report.table(figures, plan, context))
    if plot is not None:
        length_report.draw(figures, plot)


@bench.command()
@_requests_options
@_temperature_option("0")
@_repeats_option(_REPEATS)
@click.option("--turns", type=click.IntRange(min=2), default=50, show_default=True)
@_json_option
@stays_awake
def reuse(turns: int, path: Path | None, limit: int | None, as_json: bool, **options: Any) -> None:
    """Measure the first token of an agent's turns, with KV kept and without.

    \b
    launch-pipeline bench reuse --turns 50 --repeats 1
    """
    from orchestrator.lab.bench.results.report import BenchProgress, wide_console
    from orchestrator.lab.bench.workloads import prefix_reuse_report as reuse_report
    from orchestrator.lab.bench.workloads.prefix_reuse import measure

    print_notes(without_effect({}))
    plan = _plan({**options, "strategies": "adaptive"})
    prompts = _prompts(plan, path, limit)
    with BenchProgress(turns) as progress:
        found, shape = measure(plan, turns, prompts, progress.set_total, progress.finished)
    if as_json:
        click.echo(json.dumps(reuse_report.to_json(found, shape, plan)))
    else:
        wide_console().print(reuse_report.table(found, shape, plan))
    _complain(reuse_report.invalid(found))
    _fail(reuse_report.failures(found))


@bench.command()
@click.argument("counts", metavar="N[,N...]")
@_requests_options
@_temperature_option("0")
@_repeats_option(_REPEATS)
@_draft_tokens_option
@_strategies_option(_GROWING)
@_json_option
@stays_awake
def requests(counts: str, path: Path | None, limit: int | None, as_json: bool, **options: Any) -> None:
    """Measure N requests at once, for instance 1,2,4,8: the speed of all together, and how long one waits that joins.

    \b
    launch-pipeline bench requests 1,4 --draft-tokens 2 --temperature 0
    """
    from orchestrator.lab.bench.results.report import BenchProgress
    from orchestrator.lab.bench.workloads import concurrency_report
    from orchestrator.lab.bench.workloads.concurrency import measure, parse_requests

    print_notes(without_effect({}))
    numbers = parse_requests(counts)
    plan = _plan(options)
    prompts = _prompts(plan, path, limit)
    with BenchProgress((1 + len(plan.strategies)) * len(numbers) + len(plan.draft_tokens)) as turns:
        figures = measure(plan, numbers, prompts, turns.starting, turns.finished)
    if as_json:
        click.echo(json.dumps(concurrency_report.to_json(figures, plan)))
    else:
        Console().print(concurrency_report.table(figures, plan))
    _fail(concurrency_report.failures(figures))


@bench.command()
@_models_options
@_json_option
@stays_awake
def micro(target: str | None, draft: str | None, as_json: bool) -> None:
    """Measure what single steps of the workers take, each alone.

    \b
    launch-pipeline bench micro --pair demo
    """
    from orchestrator.lab.bench.costs import micro as single_steps
    from orchestrator.lab.bench.models import bench_models
    from orchestrator.lab.bench.results.report import wide_console

    print_notes(without_effect({}))
    with ConversionBar(quiet=False) as bar:
        models = bench_models(target, draft, same_model=False, on_progress=bar)
    print_notes([models.note])
    costs = single_steps.measured_forwards(models.target, models.draft)
    figures = single_steps.measured()
    if as_json:
        click.echo(json.dumps(single_steps.to_json(figures, costs)))
    else:
        wide_console().print(single_steps.forward_table(costs), "", single_steps.table(figures))


@bench.command()
@click.option(
    "--kind", "kinds", type=click.Choice(LAYER_KINDS), multiple=True, help="Of layer. May be given several times."
)
@_repeats_option(ComparisonOrder().samples)
@_json_option
@stays_awake
def forwards(kinds: tuple[LayerKind, ...], repeats: int, as_json: bool) -> None:
    """Measure forwards of random models beside mlx-lm's own, by kind of layer.

    \b
    launch-pipeline bench forwards --kind delta --kind windows
    """
    from orchestrator.lab.bench.costs import beside_stock, beside_stock_report
    from orchestrator.lab.bench.results.report import BenchProgress, wide_console

    order = ComparisonOrder(kinds=kinds or LAYER_KINDS, samples=repeats)
    with BenchProgress(len(order.kinds) * order.samples) as progress:
        progress.starting("the random models")
        figures = beside_stock.measured(order, progress.finished)
    if as_json:
        click.echo(json.dumps(beside_stock_report.to_json(figures, order)))
    else:
        wide_console().print(beside_stock_report.table(figures, order))


@bench.command()
@click.option(
    "--lengths", metavar="N[,N...]", help="Instead: first text, speed and memory behind prompts of so many tokens."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="With --lengths.")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="With --lengths.")
@click.option("--random", is_flag=True, help="With --lengths: a small model with random weights, not the default pair.")
@stays_awake
def servers(lengths: str | None, max_tokens: int, repeats: int, random: bool) -> None:
    """Send the same requests to `launch-pipeline serve` and to mlx-lm's own server, and print what each makes of them.

    Takes a quarter of an hour, and ends every server that it starts.

    \b
    launch-pipeline bench servers
    launch-pipeline bench servers --lengths 1024,2048,4096,7936
    """
    from orchestrator.lab.bench.servers import by_length, comparison

    print_notes(without_effect({}))
    try:
        if lengths is None:
            comparison.main()
        else:
            by_length.main(_counts(lengths), max_tokens, repeats, random)
    except RuntimeError as error:
        raise PipelineError(str(error)) from error


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--lengths takes numbers separated by commas, not {text!r}.") from error


def _compare(path: Path | None, limit: int | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    from orchestrator.lab.bench.results import acceptance_report, report
    from orchestrator.lab.bench.results.figures import rows, rows_by_category
    from orchestrator.lab.bench.results.plot import draw, draw_distances
    from orchestrator.lab.bench.trials import run

    plan = _plan(options, temperature=())
    texts = _prompts(plan, path, limit or (_LIMIT if path is None else None))
    asked = _requests(plan, texts)
    recorded = _recorded(plan, asked) if plan.replays else None
    absent: dict[str, str] = {}
    notes: list[str] = []
    with report.BenchProgress(1) as turns:
        progress = turns.starting, turns.set_total, turns.finished
        measurements, names = run(plan, asked, *progress, absent.__setitem__, notes.append, recorded)
    print_notes(notes)
    figures, by_category = rows(measurements, names), rows_by_category(measurements, names)
    console = report.wide_console()
    if not as_json:
        console.print(report.tables(figures, plan, len(texts), by_category, absent))
    guesses = _examined(plan, asked, measurements) if plan.drafters else []
    if as_json:
        found = report.to_json(figures, plan, len(texts), by_category, absent)
        click.echo(json.dumps(found | {"drafters": acceptance_report.to_json(guesses)}))
    elif guesses:
        console.print(acceptance_report.table(guesses))
    if plot is not None:
        subtitle = f"{plan.pace or 'this machine'}, {len(texts)} prompts, {plan.max_tokens} tokens"
        if plan.links:
            draw_distances(figures, plan.strategies, plan.links, subtitle, plot)
        else:
            draw(figures, subtitle, plot)
    _complain(report.invalid(figures))
    _fail(report.failures(figures))


def _plan(options: dict[str, Any], temperature: Sequence[float] = (0.0,)) -> "BenchPlan":
    """`temperature`: where none was given; none at all is the plan's own default. Only a comparison without links can
    be in slow motion."""
    from orchestrator.lab.bench.plan import BenchPlan
    from orchestrator.machine.profiles.device_profiles import load_profile

    pace, compares = options["pace"], "controls" in options and not options["link_delay"]
    if pace is not None and not compares and load_profile(pace).slow_motion != 1.0:
        raise click.UsageError(f"Only a comparison without links counts in the time of {pace}: leave the @ out.")
    return BenchPlan.of(**{"draft_tokens": "0", **options, "temperature": options["temperature"] or temperature})


def _prompts(plan: "BenchPlan", path: Path | None, limit: int | None) -> "list[BenchPrompt]":
    """The file's prompts, or the shipped ones for the target, whose models are fetched if need be."""
    from orchestrator.api.chat_prompts import own_template
    from orchestrator.lab.bench.prompts import read_prompts

    with ConversionBar(quiet=False) as bar:
        models = plan.models(bar)
    print_notes([models.note])
    return read_prompts(path, limit, chat=own_template(str(models.target)) is not None)


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
            _complain([f"There is no table of guesses: {error}"])
            return []


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


def _fail(sentences: Sequence[str]) -> None:
    """End with exit code 1 if there are any."""
    _complain(sentences)
    if sentences:
        sys.exit(_FAILED)


def _complain(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        click.echo(f"Error: {sentence}", err=True)
