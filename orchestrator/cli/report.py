"""Results as text for the user: the summary of a generation, findings, tables that are never cut."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.api.result import Result, conclusion, counts, figures, speed
from orchestrator.lab.findings import Findings
from orchestrator.machine.check import Check

_WIDEST = 1000
"""Characters; no table is wider."""
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
_WORDS = {"warn": "Warning", "fail": "Error"}
_FAILED = 1


def summary(result: Result, sampled: bool, every: bool = False, loading: float | None = None) -> Panel:
    """What came of a generation; with `every`, all figures about it. `loading`: seconds before it, of the models."""
    statistics, reason = result.statistics, result.finish_reason
    rows = [("seed", str(result.seed))] if sampled else []
    if every:
        rows += figures(statistics, reason)
    else:
        rows += [("tokens", counts(statistics, reason)), *conclusion(statistics)]
    if loading is not None:
        first = statistics.time_to_first_token
        rows.append(("waited", f"{loading:.1f} s for the models, then {first:.2f} s for the first token"))
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        words = Text(value)
        words.highlight_words(["Invalid"], "red")
        grid.add_row(Text(name, style="dim"), words)
    return Panel(grid, title=speed(result.statistics), title_align="left", expand=False)


def findings_table(findings: Iterable[Check]) -> Table:
    """What `doctor` found, and what to do about it."""
    table = Table(box=None, padding=(0, 2))
    for title in ("", "what", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        advice = f"\n[bold]next:[/] {finding.next_step}" if finding.next_step else ""
        table.add_row(_MARKS[finding.status], finding.name, finding.text + advice)
    return table


def show(findings: Findings, as_json: bool, plot: Path | None = None) -> None:
    """Print what a measurement found, and draw it into a file; what is wrong goes to stderr. Ends with exit code 1 if a
    check failed."""
    from orchestrator.lab import report

    if as_json:
        click.echo(report.json_text(findings))
    else:
        report.wide_console().print(report.text(findings))
    if plot is not None:
        report.picture(findings, plot)
    for check in findings.checks:
        if check.status != "ok":
            advice = f": {check.next_step}" if check.next_step else ""
            click.echo(f"{_WORDS[check.status]}: {check.name}: {check.text}{advice}.", err=True)
    if not findings.good:
        sys.exit(_FAILED)


def print_whole(table: Table) -> None:
    """Print a table whose words are never broken: with a line a row, or with a line a field where it is too wide.

    Without a terminal the table is as wide as it needs to be, so that piped output is complete.
    """
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ignore"
    console = Console()
    width = table.__rich_measure__(console, console.options.update(max_width=_WIDEST)).maximum
    if width <= console.width or not console.is_terminal:
        Console(width=max(width, console.width)).print(table, crop=False)
    else:
        for line in _fields(table):
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def _fields(table: Table) -> Iterator[str]:
    """Each row as lines of a title and a value, an empty line between rows."""
    cells = [list(column.cells) for column in table.columns]
    for row in range(table.row_count):
        yield from [""] if row else []
        for column, values in zip(table.columns, cells, strict=True):
            if values[row]:
                yield f"{column.header}: {values[row]}"
