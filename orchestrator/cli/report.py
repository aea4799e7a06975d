"""Results as text for the user: the summary of a generation, findings, tables that are never cut."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.api.result import Result, conclusion, counts, figures, rounds, speed
from orchestrator.cli.sentences import say
from orchestrator.lab.findings import Findings
from orchestrator.machine.check import Check

READING = "Reading the prompt ..."
_GAP = 2
"""Blanks between columns."""
_SHORT = 14
"""Characters; a longer word may be broken."""
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
_WORDS = {"warn": "Warning", "fail": "Error"}
_FAILED = 1


def reading(tokens: int, total: int) -> str:
    """How much of a prompt was read."""
    return f"Reading the prompt: {tokens:,} of {total:,} tokens"


def summary(result: Result, sampled: bool, every: bool = False, loading: float | None = None) -> Panel:
    """What came of a generation; with `every`, all figures about it. `loading`: seconds before it, of the models."""
    statistics, reason = result.statistics, result.finish_reason
    rows = [("seed", str(result.seed))] if sampled else []
    if every:
        rows += figures(statistics, reason)
    else:
        rows += [("tokens", counts(statistics, reason)), ("rounds", rounds(statistics)), *conclusion(statistics)]
    if loading is not None:
        first = statistics.time_to_first_token
        rows.append(
            ("waited", f"{loading:.1f} s for the models, then {first:.2f} s for the prompt and the first token")
        )
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        words = Text(value)
        words.highlight_words(["Invalid"], "red")
        grid.add_row(Text(name, style="dim"), words)
    return Panel(grid, title=speed(result.statistics), title_align="left", expand=False)


def cut_off(result: Result, most: int | None, if_full: str) -> str:
    """How an answer goes on that a limit ended; empty where none did. `most`: its limit; `if_full`: for one that filled
    the context."""
    tokens = result.statistics.generated_tokens
    if result.finish_reason != "length":
        return ""
    if most is None or tokens < most:
        return if_full
    return f"The answer ended at its limit of {tokens:,} tokens (--max-tokens): a larger one lets it go on."


def findings_table(findings: Iterable[Check]) -> Table:
    """What `doctor` found, and what to do about it."""
    table = Table("", "what", "found")
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
            say(f"{_WORDS[check.status]}: {check.name}: {check.text}{advice}.", err=True)
    if not findings.good:
        sys.exit(_FAILED)


def print_whole(table: Table) -> None:
    """Print a table of which nothing is cut: a line a row; where that is too wide, rows of several lines, in which no
    short word is broken; or where that is too wide too, a line a field.

    Without a terminal the table is as wide as it needs to be, so that piped output is complete.
    """
    console = Console()
    titles = [_text(column.header) for column in table.columns]
    rows = list(zip(*(map(_text, column.cells) for column in table.columns), strict=True))
    columns = list(zip(titles, *rows, strict=True))
    whole = [max(len(line) for cell in cells for line in cell.plain.split("\n")) for cells in columns]
    room = console.width - _GAP * (len(columns) - 1) if console.is_terminal else sum(whole)
    widths = _widths([max(map(_least, cells)) for cells in columns], whole, room)
    if widths is None:
        _print_fields(console, titles, rows)
        return
    shown = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=any(titles))
    for title, width in zip(titles, widths, strict=True):
        shown.add_column(title, width=width, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    Console(width=max(room + _GAP * (len(columns) - 1), console.width)).print(shown)


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(cell)


def _widths(least: Sequence[int], whole: Sequence[int], room: int) -> list[int] | None:
    """A width for each column: what is left beside the least goes to all in proportion to what they lack."""
    spare, lacking = room - sum(least), sum(whole) - sum(least)
    if spare < 0:
        return None
    share = min(1.0, spare / lacking) if lacking else 1.0
    return [low + int((high - low) * share) for low, high in zip(least, whole, strict=True)]


def _least(text: Text) -> int:
    """Characters below which a short word would be broken."""
    return max((min(len(word), _SHORT) for word in text.plain.split()), default=0)


def _print_fields(console: Console, titles: Sequence[Text], rows: Sequence[Sequence[Text]]) -> None:
    """Each row as lines of a title and a value, an empty line between rows. A terminal breaks long words itself."""
    for place, row in enumerate(rows):
        if place:
            console.print()
        for title, cell in zip(titles, row, strict=True):
            if cell:
                line = Text.assemble(title, ": ", cell) if title else cell
                console.print(line, highlight=False, overflow="fold")
