"""The output of `bench forwards`: a table and one JSON object."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator.lab.bench.costs.beside_stock import MOST_FORWARD, MOST_UNDO, KindFigures, WidthFigures
from orchestrator.lab.bench.forward_comparison.messages import ComparisonOrder
from orchestrator.lab.bench.results.intervals import Ratio
from orchestrator.lab.bench.results.report import machine_lines

_FOOTNOTE = f"""\
mlx-lm: milliseconds of a forward with its own caches, logits included. chain: our forward over the same tokens, as a \
ratio; the aim is at most {MOST_FORWARD:g}. tree: the same tokens as a balanced binary tree, against mlx-lm's chain. \
undo: committing the first half of a chain and undoing the rest, states computed, as a share of our forward over that \
chain; the aim is at most {MOST_UNDO:.0%}. Where our next forward repeats accepted tokens, undo is what that takes \
longer.
Medians of ratios within a sample; in brackets their 95% bootstrap intervals. Random weights; everyone takes turns in \
one process. On a processor the milliseconds are the process's processor time."""


def table(figures: Sequence[KindFigures], order: ComparisonOrder) -> Group:
    """A row a kind and width, then the settings, the machine and the definitions. Missed aims are red."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("layers", "model", "level", "tokens", "mlx-lm", "chain", "tree", "undo"):
        grid.add_column(title, justify="left" if title in ("layers", "model", "level") else "right", no_wrap=True)
    for kind in figures:
        names = [kind.built.kind, f"{kind.built.architecture}, {kind.built.parameters / 1e6:.0f}M", kind.built.level]
        for width, each in kind.widths.items():
            undo = _share(kind.undo) if width == order.round else ""
            grid.add_row(*names, str(width), *_cells(each), undo)
            names = ["", "", ""]
    scope = f"{order.samples} samples behind {order.context} tokens."
    return Group(grid, Text("\n".join([scope, *machine_lines(), _FOOTNOTE]), style="dim"))


def to_json(figures: Sequence[KindFigures], order: ComparisonOrder) -> dict[str, Any]:
    """The machine, the settings, and every kind with the names of its missed aims."""
    return {
        "machine": machine_lines(),
        "settings": msgspec.to_builtins(order),
        "results": [
            {
                **msgspec.to_builtins(kind.built),
                "widths": {str(width): _values(each) for width, each in kind.widths.items()},
                "undo": kind.undo._asdict(),
                "missed": kind.missed,
            }
            for kind in figures
        ],
    }


def _values(figures: WidthFigures) -> dict[str, Any]:
    ratios = {name: ratio and ratio._asdict() for name, ratio in (("chain", figures.chain), ("tree", figures.tree))}
    return {"milliseconds": figures.milliseconds, **ratios}


def _cells(figures: WidthFigures) -> tuple[str, ...]:
    chain = _text(figures.chain, "{:.2f}")
    return (
        f"{figures.milliseconds:.1f}",
        _marked(chain, figures.chain.median > MOST_FORWARD),
        _text(figures.tree, "{:.2f}") if figures.tree else "",
    )


def _share(undo: Ratio) -> str:
    return _marked(_text(undo, "{:.1%}"), undo.median > MOST_UNDO)


def _text(ratio: Ratio, form: str) -> str:
    interval = ratio.interval and f" ({form.format(ratio.interval.low)} to {form.format(ratio.interval.high)})"
    return form.format(ratio.median) + (interval or "")


def _marked(text: str, missed: bool) -> str:
    return f"[red]{text}[/red]" if missed else text
