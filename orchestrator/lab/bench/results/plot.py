"""A bench's rows as PNG pictures: tokens/s by contender, sweeps over K and temperature, the draft's distance."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.lab.bench.names import AUTOREGRESSIVE, PLAIN, remote_name
from orchestrator.lab.bench.results.figures import BenchRow, best_of_each_line
from orchestrator.lab.bench.results.sweep_plot import (
    BASELINE,
    SPREAD,
    Styles,
    draw_draft_token_sweep,
    draw_temperature_sweep,
    has_draft_token_sweep,
    styles_of,
)
from orchestrator.runtime.link_emulation import EmulatedLink
from protocol.errors import InputError

_OURS, _INVALID = "#2a6fdb", "#d64545"
_MOST_COLUMNS = 3
_WIDTH, _HEIGHT = 5.6, 4.6
"""Inches of a panel."""
_LEGEND = 1.8
"""Inches."""
_PROMISED = 0.97
"""Share of plain decoding's speed that a draft at any distance must leave."""
_LOCAL_MILLISECONDS = 0.1
"""Place of a draft without a link on the logarithmic axis."""

_Panel = tuple[str, Callable[[Any], None]]
"""Its title, and what draws it."""


def draw(rows: Sequence[BenchRow], subtitle: str, path: Path) -> None:
    """Bars by contender; where K or the temperature has several values, also a sweep over it.

    Bars have the fastest K of each line; whiskers are quartiles. Rows with wrong tokens or overruns have no bar and no
    point.
    """
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    best, styles = best_of_each_line(rows), styles_of(rows)
    groups: list[list[_Panel]] = [[(f"temperature {each:g}", _bars(_at(each, best))) for each in temperatures]]
    if has_draft_token_sweep(rows):
        title = "K at temperature {:g}; whiskers: quartiles over prompts"
        groups.append([(title.format(each), _draft_token_sweep(_at(each, rows), styles)) for each in temperatures])
    if len(temperatures) > 1:
        title = f"speed-up over {PLAIN}'s plain decoding; whiskers: 95% intervals"
        groups.append([(title, lambda panel: draw_temperature_sweep(panel, best, styles))])
    _draw_groups(groups, subtitle, path)


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

    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), dpi=150, layout="constrained")
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


def _draw_groups(groups: Sequence[Sequence[_Panel]], subtitle: str, path: Path) -> None:
    """Each group of panels begins a new line of panels; each line has one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_MOST_COLUMNS, max(map(len, groups)))
    lines = [group[begin : begin + columns] for group in groups for begin in range(0, len(group), columns)]
    size = _WIDTH * columns + (_LEGEND if len(groups) > 1 else 0), _HEIGHT * len(lines)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for part, line in zip(figure.subfigures(len(lines), 1, squeeze=False).flat, lines, strict=True):
        _draw_panels(part, line)
    figure.suptitle(subtitle, x=0.01, ha="left", fontsize=10)
    save(figure, path)


def _draw_panels(part: Any, panels: Sequence[_Panel]) -> None:
    """Side by side, with a legend of all of them beside the last."""
    handles: dict[str, Any] = {}
    for column, (title, draw_panel) in enumerate(panels):
        panel = part.add_subplot(1, len(panels), column + 1)
        panel.spines[["top", "right"]].set_visible(False)
        draw_panel(panel)
        panel.set_title(title, loc="left", fontsize=10)
        found, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    if handles:
        part.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=8)


def _at(temperature: float, rows: Sequence[BenchRow]) -> list[BenchRow]:
    return [row for row in rows if row.temperature == temperature]


def _draft_token_sweep(rows: Sequence[BenchRow], styles: Styles) -> Callable[[Any], None]:
    return lambda panel: draw_draft_token_sweep(panel, rows, styles)


def _bars(rows: Sequence[BenchRow]) -> Callable[[Any], None]:
    return lambda panel: _draw_bars(panel, rows)


def _draw_bars(panel: Any, rows: Sequence[BenchRow]) -> None:
    heights = range(len(rows))
    shown = [row.tokens_per_second if row.valid else 0.0 for row in rows]
    spread = [
        [max(0.0, row.tokens_per_second - row.quartiles.low) if row.valid else 0.0 for row in rows],
        [max(0.0, row.quartiles.high - row.tokens_per_second) if row.valid else 0.0 for row in rows],
    ]
    colours = [BASELINE if row.contender.startswith(PLAIN) else _OURS for row in rows]
    panel.barh(heights, shown, xerr=spread, color=colours, ecolor=SPREAD, capsize=2)
    panel.set_yticks(heights, [row.contender for row in rows])
    panel.invert_yaxis()
    panel.set_xlabel("tokens/s (whiskers: quartiles over prompts)")
    for height, row in zip(heights, rows, strict=True):
        label = f" {row.tokens_per_second:.1f}" if row.valid else " WRONG" if not row.exact else " INVALID"
        panel.annotate(label, (0, height), va="center", fontsize=8, color="white" if row.valid else _INVALID)


def _draw_ratios(panel: Any, strategy: str, links: Sequence[EmulatedLink], by_name: dict[str, BenchRow]) -> None:
    names = [
        (_LOCAL_MILLISECONDS, strategy),
        *((1000 * link.delay or _LOCAL_MILLISECONDS, remote_name(strategy, link)) for link in links),
    ]
    points = [(delay, by_name[name].over_autoregressive) for delay, name in names if name in by_name]
    known = [(delay, ratio) for delay, ratio in points if ratio is not None]
    panel.plot([delay for delay, _ in known], [ratio for _, ratio in known], marker="o", label=strategy)
