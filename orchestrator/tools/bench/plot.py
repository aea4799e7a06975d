"""A bench's rows as a picture: tokens/s of every contender, a panel a temperature. Loads matplotlib when called."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.tools.bench.figures import BenchRow
from protocol.errors import InputError

_THEIRS, _OURS, _VOID = "#9aa5b1", "#2a6fdb", "#d64545"


def draw(rows: Sequence[BenchRow], subtitle: str, path: Path) -> None:
    """Write a PNG. Bars are medians, whiskers slowest and fastest; what isn't exact or representative has no bar."""
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure, panels = panels_of(len(temperatures))
    for panel, temperature in zip(panels, temperatures, strict=True):
        _panel(panel, [row for row in rows if row.temperature == temperature])
        panel.set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
        panel.set_xlabel("tokens/s")
    figure.suptitle(subtitle, x=0.01, ha="left", fontsize=10)
    save(figure, path)


def panels_of(count: int) -> tuple[Any, list[Any]]:
    """A figure with so many panels side by side, for a file and never for a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * count, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(1, count, index + 1) for index in range(count)]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save(figure: Any, path: Path) -> None:
    """Raises InputError if the file can't be written."""
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"{path} can't be written ({error.strerror}): choose another file for --plot.") from error


def _panel(panel: Any, rows: Sequence[BenchRow]) -> None:
    heights = range(len(rows))
    shown = [row.tokens_per_second if _sound(row) else 0.0 for row in rows]
    spread = [
        [max(0.0, row.tokens_per_second - row.slowest) if _sound(row) else 0.0 for row in rows],
        [max(0.0, row.fastest - row.tokens_per_second) if _sound(row) else 0.0 for row in rows],
    ]
    colours = [_THEIRS if row.contender.startswith("mlx-lm") else _OURS for row in rows]
    panel.barh(heights, shown, xerr=spread, color=colours, ecolor="#52606d", capsize=2)
    panel.set_yticks(heights, [row.contender for row in rows])
    panel.invert_yaxis()
    for height, row in zip(heights, rows, strict=True):
        label = f" {row.tokens_per_second:.1f}" if _sound(row) else " WRONG" if not row.exact else " INVALID"
        panel.annotate(label, (0, height), va="center", fontsize=8, color="white" if _sound(row) else _VOID)


def _sound(row: BenchRow) -> bool:
    return row.exact and row.representative
