"""Results as text for the user: the summary of a generation, findings, tables that are never cut."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.api.result import Result
from protocol.messages.client import Pace, Statistics

_WIDEST = 1000
"""Characters; no table is wider."""
_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


class Finding(Protocol):
    """One line of `doctor`."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def next_step(self) -> str | None: ...


def summary(result: Result, sampled: bool) -> Panel:
    """One screen of figures about a generation."""
    figures = result.statistics
    grid = Table.grid(padding=(0, 2))
    for name, value in _lines(result, figures, sampled):
        grid.add_row(Text(name, style="dim"), value)
    return Panel(grid, title=f"{figures.tokens_per_second:.1f} tokens/s", title_align="left", expand=False)


def findings_table(findings: Iterable[Finding]) -> Table:
    """What `doctor` found, and what to do about it."""
    table = Table(box=None, padding=(0, 2))
    for title in ("", "what", "found"):
        table.add_column(title)
    for finding in findings:
        advice = f"\n[bold]next:[/] {finding.next_step}" if finding.next_step else ""
        table.add_row(_MARKS[finding.status], finding.name, finding.text + advice)
    return table


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


def _lines(result: Result, figures: Statistics, sampled: bool) -> Iterable[tuple[str, str]]:
    yield "tokens", f"{figures.generated_tokens} after a prompt of {figures.prompt_tokens} ({result.finish_reason})"
    if figures.adopted_tokens:
        yield "adopted", f"{figures.adopted_tokens} tokens whose KV was there already"
    yield "time to first token", f"{figures.time_to_first_token * 1000:.0f} ms"
    yield "rounds", f"{figures.rounds}, {figures.tokens_per_round:.2f} tokens a round"
    yield "hit rate", _percent(figures.hit_rate)
    yield "acceptance", _percent(figures.acceptance_rate)
    if figures.acceptance_by_depth:
        yield "  by depth", " ".join(f"{share:.0%}" for share in figures.acceptance_by_depth[:12])
    yield "target busy", _percent(figures.target_busy)
    yield "draft busy", f"{_percent(figures.draft_busy)}, {_percent(figures.wasted_draft_share)} of its nodes unused"
    yield "overhead a round", f"{figures.overhead_per_round * 1e6:.0f} µs (median)"
    if figures.pace is not None:
        yield "pace", pace_sentence(figures.pace)
    if sampled:
        yield "seed", str(result.seed)


def pace_sentence(pace: Pace) -> str:
    """Whether the figures of a run can stand for its profile's device."""
    kept = f"{pace.profile}: {pace.overruns} of {pace.forwards} forwards overran, {pace.stretch:.1%} longer in all"
    return kept if pace.valid else f"{kept}. [red]Invalid[/]: this machine is too slow for the profile, or too busy."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
