"""A bench's rows as PNG pictures, a panel a temperature: tokens/s by contender, and speed by the draft's distance."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.runtime.link_emulation import EmulatedLink
from orchestrator.tools.bench.figures import BenchRow
from orchestrator.tools.bench.names import AUTOREGRESSIVE, remote_name
from protocol.errors import InputError

_BASELINE, _OURS, _INVALID = "#9aa5b1", "#2a6fdb", "#d64545"
_PROMISED = 0.97
"""Share of plain decoding's speed that a draft at any distance must leave."""
_LOCAL_MILLISECONDS = 0.1
"""Place of a draft without a link on the logarithmic axis."""


def draw(rows: Sequence[BenchRow], subtitle: str, path: Path) -> None:
    """Bars are medians, whiskers slowest and fastest. Rows with wrong tokens or overruns have no bar."""
    _draw_by_temperature(rows, subtitle, path, _draw_bars)


def draw_distances(
    rows: Sequence[BenchRow], strategies: Sequence[str], links: Sequence[EmulatedLink], subtitle: str, path: Path
) -> None:
    """The ratio to plain decoding by the delay between target and draft."""

    def draw_panel(panel: Any, rows: Sequence[BenchRow]) -> None:
        by_name = {row.contender: row for row in rows}
        for strategy in (name for name in strategies if name != AUTOREGRESSIVE):
            _draw_ratios(panel, strategy, links, by_name)
        panel.axhline(_PROMISED, color="#d64545", linewidth=0.8, linestyle="--", label=f"{_PROMISED:g}")
        loss = max(link.loss for link in links)
        panel.set_xlabel(f"delay one way, ms, {loss:.0%} lost ({_LOCAL_MILLISECONDS:g}: no link)")
        panel.set_ylabel("tokens/s relative to ar")
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False)

    _draw_by_temperature(rows, subtitle, path, draw_panel)


def panels_of(count: int) -> tuple[Any, list[Any]]:
    """A figure with `count` panels side by side, for a file."""
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


def _draw_by_temperature(
    rows: Sequence[BenchRow], subtitle: str, path: Path, draw_panel: Callable[[Any, Sequence[BenchRow]], None]
) -> None:
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure, panels = panels_of(len(temperatures))
    for panel, temperature in zip(panels, temperatures, strict=True):
        draw_panel(panel, [row for row in rows if row.temperature == temperature])
        panel.set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
    figure.suptitle(subtitle, x=0.01, ha="left", fontsize=10)
    save(figure, path)


def _draw_bars(panel: Any, rows: Sequence[BenchRow]) -> None:
    heights = range(len(rows))
    shown = [row.tokens_per_second if _is_valid(row) else 0.0 for row in rows]
    spread = [
        [max(0.0, row.tokens_per_second - row.slowest) if _is_valid(row) else 0.0 for row in rows],
        [max(0.0, row.fastest - row.tokens_per_second) if _is_valid(row) else 0.0 for row in rows],
    ]
    colours = [_BASELINE if row.contender.startswith("mlx-lm") else _OURS for row in rows]
    panel.barh(heights, shown, xerr=spread, color=colours, ecolor="#52606d", capsize=2)
    panel.set_yticks(heights, [row.contender for row in rows])
    panel.invert_yaxis()
    panel.set_xlabel("tokens/s")
    for height, row in zip(heights, rows, strict=True):
        label = f" {row.tokens_per_second:.1f}" if _is_valid(row) else " WRONG" if not row.exact else " INVALID"
        panel.annotate(label, (0, height), va="center", fontsize=8, color="white" if _is_valid(row) else _INVALID)


def _is_valid(row: BenchRow) -> bool:
    return row.exact and row.representative


def _draw_ratios(panel: Any, strategy: str, links: Sequence[EmulatedLink], by_name: dict[str, BenchRow]) -> None:
    names = [
        (_LOCAL_MILLISECONDS, strategy),
        *((1000 * link.delay or _LOCAL_MILLISECONDS, remote_name(strategy, link)) for link in links),
    ]
    points = [(delay, by_name[name].over_autoregressive) for delay, name in names if name in by_name]
    known = [(delay, ratio) for delay, ratio in points if ratio is not None]
    panel.plot([delay for delay, _ in known], [ratio for _, ratio in known], marker="o", label=strategy)
