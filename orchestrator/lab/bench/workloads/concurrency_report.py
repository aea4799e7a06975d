"""The output of `bench requests`: a table and one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.results.report import machine_lines
from orchestrator.lab.bench.workloads.concurrency import ConcurrencyRun

_FOOTNOTE = """\
tok/s: of all requests together, while all of them are decoded; every number of requests has the same prompts. x: \
relative to one request. joins after: from a request's submission, just after a round of the others began, to its \
first token, without the target's prefill of its prompt. round: length of its rounds. Medians. mlx-lm batches without \
a draft; with one (K) it serves one request after the other."""


def table(figures: Sequence[ConcurrencyRun], plan: BenchPlan) -> Group:
    """One line a contender and number of requests, then the settings, the machine and the definitions."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("contender", "requests", "tok/s", "x", "joins after", "round", "tokens"):
        grid.add_column(title, justify="left" if title == "contender" else "right")
    for row in figures:
        grid.add_row(*_cells(row, _single(row, figures)), style="" if row.representative else "red")
    pace = f" Paced as {plan.pace}; INVALID: did not keep the pace." if plan.pace else ""
    scope = f"{plan.max_tokens} tokens at temperature {plan.temperatures[0]:g}, {plan.repeats} repeats.{pace}"
    return Group(grid, Text("\n".join([scope, *machine_lines(), _FOOTNOTE]), style="dim"))


def to_json(figures: Sequence[ConcurrencyRun], plan: BenchPlan) -> dict[str, Any]:
    """The machine, the settings and every row."""
    return {
        "machine": machine_lines(),
        "settings": msgspec.to_builtins(asdict(plan)),
        "results": [asdict(row) for row in figures],
    }


def failures(figures: Sequence[ConcurrencyRun]) -> list[str]:
    """A sentence for each line with a wrong token."""
    return [
        f"{row.contender} with {row.requests} requests at once gave other tokens than each request alone."
        for row in figures
        if row.exact is False
    ]


def _single(row: ConcurrencyRun, figures: Sequence[ConcurrencyRun]) -> ConcurrencyRun | None:
    """The same contender with one request."""
    return next((one for one in figures if one.contender == row.contender and one.requests == 1), None)


def _cells(row: ConcurrencyRun, single: ConcurrencyRun | None) -> list[str]:
    ratio = "" if single is None else f"{row.tokens_per_second / single.tokens_per_second:.2f}"
    joins, round = (
        "" if seconds is None else f"{1000 * seconds:.0f} ms" for seconds in (row.joining_seconds, row.round_seconds)
    )
    exact = {True: "exact", False: "WRONG", None: ""}[row.exact]
    speed = f"{row.tokens_per_second:.1f}" if row.representative else "INVALID"
    return [row.contender, str(row.requests), speed, ratio, joins, round, exact]
