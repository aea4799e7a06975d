"""Panels of a bench's sweeps: tokens/s over K, and speed-up over temperature. Draws into given axes, writes no file."""

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.tools.bench.figures import BenchRow
from orchestrator.tools.bench.intervals import Interval
from orchestrator.tools.bench.names import PLAIN, line_and_draft_tokens

BASELINE, SPREAD = "#7b8794", "#52606d"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#8c564b")
"""The first six are Okabe and Ito's, which colour-blind readers can tell apart."""
_MARKERS = "osD^vPX*"
_DODGE = 0.06
"""Distance of neighbouring lines on the K axis, so that whiskers do not cover each other."""


def has_draft_token_sweep(rows: Sequence[BenchRow]) -> bool:
    """Whether a line was measured with several K."""
    return any(len(points) > 1 for points in _lines(rows).values())


def draw_draft_token_sweep(panel: Any, rows: Sequence[BenchRow], styles: dict[str, dict[str, Any]]) -> None:
    """Tokens/s over K at one temperature: medians, whiskers quartiles. Contenders without a K are horizontal lines.

    `styles`: see `styles_of`.
    """
    lines = _lines(rows)
    for index, (line, points) in enumerate(lines.items()):
        counts = [row.draft_tokens + _DODGE * (index - len(lines) / 2) for row in points if row.draft_tokens]
        _draw_line(
            panel,
            counts,
            [row.tokens_per_second for row in points],
            [row.quartiles for row in points],
            label=line,
            **styles[line],
        )
    for row in rows:
        if row.draft_tokens is None and row.valid:
            colour = styles[row.contender]["color"]
            panel.axhline(row.tokens_per_second, color=colour, linewidth=1, linestyle=":", label=row.contender)
    counts = sorted({row.draft_tokens for row in rows if row.draft_tokens})
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_xlabel("K, draft tokens a round")
    panel.set_ylabel("tokens/s (whiskers: quartiles over prompts)")
    _finish(panel)


def draw_temperature_sweep(panel: Any, rows: Sequence[BenchRow], styles: dict[str, dict[str, Any]]) -> None:
    """Speed-up over mlx-lm's plain decoding by temperature; whiskers are 95% intervals. `rows`: one a line and T."""
    for line in dict.fromkeys(map(_name, rows)):
        points = [(row, row.ratios[PLAIN]) for row in rows if _name(row) == line and row.valid and PLAIN in row.ratios]
        if line != PLAIN and points:
            _draw_line(
                panel,
                [row.temperature for row, _ in points],
                [ratio.median for _, ratio in points],
                [ratio.interval or Interval(ratio.median, ratio.median) for _, ratio in points],
                label=line,
                **styles[line],
            )
    panel.axhline(1.0, color=BASELINE, linewidth=1, linestyle=":", label=f"{PLAIN}, plain")
    panel.set_xticks(sorted({row.temperature for row in rows}))
    panel.set_xlabel("temperature")
    panel.set_ylabel("speed-up (whiskers: 95% intervals)")
    _finish(panel)


def styles_of(rows: Sequence[BenchRow]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each line, the same in all panels; mlx-lm's lines are grey."""
    names = dict.fromkeys([*map(_name, rows), *(line_and_draft_tokens(row.contender)[0] for row in rows)])
    ours = [name for name in names if not name.startswith(PLAIN)]
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(ours)}
    return {
        name: {"color": colours.get(name, BASELINE), "marker": _MARKERS[index % len(_MARKERS)]}
        for index, name in enumerate(names)
    }


def _name(row: BenchRow) -> str:
    """The line; with "best K" where the row is one of several K."""
    line, draft_tokens = line_and_draft_tokens(row.contender)
    return line if draft_tokens is None else f"{line}, best K"


def _lines(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """The valid rows of each line that has a K, by K."""
    found: dict[str, list[BenchRow]] = {}
    for row in sorted(_with_draft_tokens(rows), key=lambda row: row.draft_tokens or 0):
        found.setdefault(line_and_draft_tokens(row.contender)[0], []).append(row)
    return found


def _with_draft_tokens(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    return (row for row in rows if row.draft_tokens is not None and row.valid)


def _draw_line(
    panel: Any, places: Sequence[float], values: Sequence[float], spread: Sequence[Interval], **style: Any
) -> None:
    below = [max(0.0, value - interval.low) for value, interval in zip(values, spread, strict=True)]
    above = [max(0.0, interval.high - value) for value, interval in zip(values, spread, strict=True)]
    panel.errorbar(places, values, yerr=[below, above], capsize=2, linewidth=1.6, elinewidth=0.8, markersize=4, **style)


def _finish(panel: Any) -> None:
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
