"""The output of `bench growth`: a table, one JSON object, a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.results.plot import panels_of, save
from orchestrator.lab.bench.results.report import machine_lines
from orchestrator.lab.bench.workloads.prompt_length import LENGTHS, PromptLengthFigures, left_out

_FOOTNOTE = """\
µs: time of a round without verification, deliberate waiting for the draft included. Medians over repeats."""


def table(figures: Sequence[PromptLengthFigures], plan: BenchPlan, context: int) -> Group:
    """One line a strategy and length, then the settings, the machine and the definitions."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("strategy", "prompt", "tok/s", "tok/round", "µs"):
        grid.add_column(title, justify="left" if title == "strategy" else "right")
    for row in figures:
        grid.add_row(*_cells(row), style="" if row.representative else "red")
    pace = f" Paced as {plan.pace}." if plan.pace else ""
    scope = f"{plan.max_tokens} tokens at temperature {plan.temperatures[0]:g}, {plan.repeats} repeats.{pace}"
    notes = [scope, left_out(context, plan.max_tokens), *machine_lines(), _FOOTNOTE]
    return Group(grid, Text("\n".join(filter(None, notes)), style="dim"))


def to_json(figures: Sequence[PromptLengthFigures], plan: BenchPlan, context: int) -> dict[str, Any]:
    """The machine, the settings, the context and every row."""
    return {
        "machine": machine_lines(),
        "settings": msgspec.to_builtins(asdict(plan)),
        "context": context,
        "left_out": [length for length in LENGTHS if length + plan.max_tokens > context],
        "results": [asdict(row) for row in figures],
    }


def draw(figures: Sequence[PromptLengthFigures], path: Path) -> None:
    """Write a PNG: speed and overhead by length."""
    figure, panels = panels_of(2)
    for panel, title in zip(panels, ("tokens/s", "µs a round without verification"), strict=False):
        for strategy in dict.fromkeys(row.strategy for row in figures):
            rows = [row for row in figures if row.strategy == strategy]
            values = [row.tokens_per_second if panel is panels[0] else row.overhead_per_round * 1e6 for row in rows]
            panel.plot([row.prompt_tokens for row in rows], values, marker="o", label=strategy)
        places = sorted({row.prompt_tokens for row in figures})
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("prompt tokens")
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{place:,}" for place in places], fontsize=7)
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    save(figure, path)


def _cells(row: PromptLengthFigures) -> tuple[str, ...]:
    speed = f"{row.tokens_per_second:.1f}" if row.representative else "INVALID"
    overhead = f"{row.overhead_per_round * 1e6:.0f}"
    return row.strategy, f"{row.prompt_tokens:,}", speed, f"{row.tokens_per_round:.2f}", overhead
