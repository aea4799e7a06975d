"""Results as text for the user: the summary of a generation, findings, tables that are never cut."""

import sys
from collections.abc import Iterable

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.api.result import BRIEF, Result, figures, speed
from orchestrator.cli.sentences import say
from orchestrator.lab.findings import Findings
from orchestrator.machine.check import Check

READING = "Reading the prompt ..."
_WIDEST = 1 << 20
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
_WORDS = {"warn": "Warning", "fail": "Error"}
_FAILED = 1


def reading(tokens: int, total: int, queued: int) -> str:
    """How much of a prompt was read, or its place in the queue."""
    if queued:
        return f"Waiting for other requests: number {queued} in the queue"
    return f"Reading the prompt: {tokens:,} of {total:,} tokens"


def summary(result: Result, sampled: bool, every: bool = False, loading: float | None = None) -> Panel:
    """What came of a generation; with `every`, all figures about it. `loading`: seconds before it, of the models."""
    statistics = result.statistics
    rows = [("seed", str(result.seed))] if sampled else []
    rows += [row for row in figures(statistics) if every or row[0] in BRIEF]
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
    return Panel(grid, title=speed(statistics), title_align="left", expand=False)


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


def show(findings: Findings, as_json: bool) -> None:
    """Print what a measurement found; what is wrong goes to stderr. Ends with exit code 1 if a check failed."""
    from orchestrator.lab import report

    if as_json:
        click.echo(report.json_text(findings))
    else:
        report.wide_console().print(report.text(findings))
    for check in findings.checks:
        if check.status != "ok":
            advice = f": {check.next_step}" if check.next_step else ""
            say(f"{_WORDS[check.status]}: {check.name}: {check.text}{advice}.", err=True)
    if not findings.good:
        sys.exit(_FAILED)


def print_whole(table: Table) -> None:
    """Print a table of which nothing is cut: a terminal breaks what is too wide for it, and without one the table is as
    wide as it needs to be, so that piped output is complete."""
    table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
    for column in table.columns:
        column.overflow = "fold"
    console = Console()
    (console if console.is_terminal else Console(width=_WIDEST)).print(table)
