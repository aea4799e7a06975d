"""Panels of a bench's sweeps: tokens/s over K, and speed-up over temperature. Draws into given axes, writes no file."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.lab.bench.names import PLAIN, line_and_draft_tokens
from orchestrator.lab.bench.results.figures import BenchRow
from orchestrator.lab.bench.results.intervals import Interval

BASELINE, SPREAD = "#7b8794", "#52606d"
_BASELINES = ("#323f4b", "#9aa5b1")
_OURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#8c564b")
"""The first six are Okabe and Ito's, which colour-blind readers can tell apart."""
_MARKERS = "osD^vPX*"
_DODGE = 0.1
"""Distance of neighbouring lines on the K axis, so that whiskers do not cover each other."""

Styles = Mapping[str, Mapping[str, Any]]
"""Colour and marker of each line."""


def styles_of(rows: Sequence[BenchRow]) -> Styles:
    """The same for a line in all panels; mlx-lm's lines are grey."""
    lines = list(dict.fromkeys(map(_line, rows)))
    baselines = [line for line in lines if line.startswith(PLAIN)]
    ours = [line for line in lines if line not in baselines]
    colours = {line: _BASELINES[index % len(_BASELINES)] for index, line in enumerate(baselines)}
    colours |= {line: _OURS[index % len(_OURS)] for index, line in enumerate(ours)}
    return {
        line: {"color": colours[line], "marker": _MARKERS[index % len(_MARKERS)]} for index, line in enumerate(lines)
    }


def has_draft_token_sweep(rows: Sequence[BenchRow]) -> bool:
    """Whether a line was measured with several K."""
    return any(len({row.draft_tokens for row in points}) > 1 for points in _by_line(rows).values())


def draw_draft_token_sweep(panel: Any, rows: Sequence[BenchRow], styles: Styles) -> None:
    """Tokens/s over K at one temperature: medians, whiskers quartiles. Contenders without a K are horizontal lines."""
    lines = _by_line(rows)
    for index, (line, points) in enumerate(lines.items()):
        shift = _DODGE * (index - (len(lines) - 1) / 2)
        places = [row.draft_tokens + shift for row in points if row.draft_tokens is not None]
        speeds = [row.tokens_per_second for row in points]
        _draw_line(panel, places, speeds, [row.quartiles for row in points], label=line, **styles[line])
    for row in rows:
        if row.draft_tokens is None and row.valid:
            colour, label = styles[row.contender]["color"], f"{row.contender}, no K"
            panel.axhline(row.tokens_per_second, color=colour, linewidth=1.2, linestyle="--", label=label)
    counts = sorted({row.draft_tokens for row in rows if row.draft_tokens is not None})
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_xlabel("K, draft tokens a round")
    panel.set_ylabel("tokens/s")
    panel.set_ylim(bottom=0)
    _add_grid(panel)


def draw_temperature_sweep(panel: Any, rows: Sequence[BenchRow], styles: Styles) -> None:
    """Speed-up over mlx-lm's plain decoding by temperature; whiskers are 95% intervals.

    `rows` has the best K of each line.
    """
    for name in dict.fromkeys(map(_label, rows)):
        points = [row for row in rows if _label(row) == name and row.valid and PLAIN in row.ratios]
        if name == PLAIN or not points:
            continue
        ratios = [row.ratios[PLAIN] for row in points]
        _draw_line(
            panel,
            [row.temperature for row in points],
            [ratio.median for ratio in ratios],
            [ratio.interval or Interval(ratio.median, ratio.median) for ratio in ratios],
            label=name,
            linestyle="--" if points[0].draft_tokens is None and name.startswith(PLAIN) else "-",
            **styles[_line(points[0])],
        )
    panel.axhline(1.0, color=BASELINE, linewidth=1.2, linestyle=":", label=PLAIN)
    panel.set_xticks(sorted({row.temperature for row in rows}))
    panel.set_xlabel("temperature")
    panel.set_ylabel(f"tokens/s relative to {PLAIN}")
    _add_grid(panel)


def _line(row: BenchRow) -> str:
    return line_and_draft_tokens(row.contender)[0]


def _label(row: BenchRow) -> str:
    return _line(row) if row.draft_tokens is None else f"{_line(row)}, best K"


def _by_line(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """The valid rows of each line that has a K, by K."""
    found: dict[str, list[BenchRow]] = {}
    known = [row for row in rows if row.draft_tokens is not None and row.valid]
    for row in sorted(known, key=lambda row: row.draft_tokens or 0):
        found.setdefault(_line(row), []).append(row)
    return found


def _draw_line(
    panel: Any, places: Sequence[float], values: Sequence[float], spread: Sequence[Interval], **style: Any
) -> None:
    below = [max(0.0, value - interval.low) for value, interval in zip(values, spread, strict=True)]
    above = [max(0.0, interval.high - value) for value, interval in zip(values, spread, strict=True)]
    panel.errorbar(places, values, yerr=[below, above], capsize=2, linewidth=1.8, elinewidth=0.7, markersize=4, **style)


def _add_grid(panel: Any) -> None:
    panel.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    panel.set_axisbelow(True)
