"""`launch-pipeline bench --micro` and `--forward`: what single steps cost, without a comparison of contenders."""

import json

import click

from orchestrator.cli.conversion_bar import ConversionBar
from orchestrator.cli.pipelines import print_notes
from orchestrator.lab.bench.forward_comparison.messages import ComparisonOrder, LayerKind


def micro(target: str | None, draft: str | None, as_json: bool) -> None:
    """Measure and print single steps of the workers."""
    from orchestrator.lab.bench.costs import micro
    from orchestrator.lab.bench.models import bench_models
    from orchestrator.lab.bench.results.report import wide_console

    with ConversionBar(quiet=False) as bar:
        models = bench_models(target, draft, same_model=False, on_progress=bar)
    print_notes([models.note])
    costs = micro.measured_forwards(models.target, models.draft)
    figures = micro.measured()
    if as_json:
        click.echo(json.dumps(micro.to_json(figures, costs)))
    else:
        wide_console().print(micro.forward_table(costs), "", micro.table(figures))


def forwards(kinds: tuple[LayerKind, ...], samples: int | None, as_json: bool) -> None:
    """Measure and print forwards of random models beside mlx-lm's own."""
    from orchestrator.lab.bench.costs import beside_stock, beside_stock_report
    from orchestrator.lab.bench.results.report import BenchProgress, wide_console

    order = ComparisonOrder(kinds=kinds, samples=samples or ComparisonOrder().samples)
    with BenchProgress(len(kinds) * order.samples) as progress:
        progress.starting("the random models")
        figures = beside_stock.measured(order, progress.finished)
    if as_json:
        click.echo(json.dumps(beside_stock_report.to_json(figures, order)))
    else:
        wide_console().print(beside_stock_report.table(figures, order))
