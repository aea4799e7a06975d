"""Findings as text for a terminal, as JSON, and as sections of a page. Prints nothing."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as TerminalTable
from rich.text import Text

from orchestrator.lab.findings import Cell, Column, Findings, Listener, Table, Value
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.blas.library import fast_blas
from orchestrator.machine.check import Check
from orchestrator.machine.placement import usual_cores

_NARROWEST = 128
"""Characters that a table may need."""
_LONG_TITLES = 100
"""Characters of all titles of a table: longer ones may take several lines."""


def machine_lines() -> tuple[str, ...]:
    """The hardware and libraries that figures depend on."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    shares = usual_cores()
    cores = ""
    if shares and shares["target"] == shares["draft"]:
        cores = f"{len(shares['target'])} cores, which target and draft share"
    elif shares:
        cores = f"cores of the target {len(shares['target'])}, of the draft {len(shares['draft'])}"
    blas = f"BLAS {fast_blas() or 'as MLX ships it'}" if shares else ""
    return tuple(line for line in (machine_facts.chip(), versions, cores, blas) if line)


# Cells -----------------------------------------------------------------------------------------------


def shown(cell: Cell, form: str = "") -> str:
    """A cell as text, with its column's format."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, tuple):
        *median, low, high = (_number(each, form) for each in cell)
        return f"{median[0]} ({low} to {high})" if median else f"{low}..{high}"
    return _number(cell, form)


def _number(value: float, form: str) -> str:
    """Without a format: four digits that mean something; whole numbers whole."""
    if form:
        return format(value, form)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _words(table: Table) -> list[bool]:
    """Which columns hold words alone."""
    cells = [[row[place] for row in table.rows] for place in range(len(table.columns))]
    return [bool(column) and all(isinstance(cell, str) for cell in column) for column in cells]


def _values_table(values: Sequence[Value]) -> Table:
    """A row a number."""
    rows = tuple((each.name, each.value, each.unit) for each in values)
    return Table("", ("", "", "unit"), rows)


def _meanings(tables: Iterable[Table]) -> list[str]:
    """A sentence for each column that has one, and a cell."""
    found = (
        column
        for table in tables
        for column, *cells in zip(table.described, *table.rows, strict=True)
        if column.meaning and any(cell not in (None, "") for cell in cells)
    )
    return [f"{title}: {meaning}." for title, meaning in {each.title: each.meaning for each in found}.items()]


# A terminal ------------------------------------------------------------------------------------------


def text(findings: Findings) -> Group:
    """Tables and numbers, then what they depend on and mean. Checks are the command's to tell."""
    parts: list[RenderableType] = []
    if findings.values:
        parts += [_terminal_table(_values_table(findings.values)), ""]
    for table in findings.tables:
        parts += [_terminal_table(table), ""]
        parts += [Text(table.note, style="dim")] if table.note else []
    told = [*findings.conditions, " ".join(_meanings(findings.tables)), *findings.notes]
    return Group(*parts, Text("\n".join(filter(None, told)), style="dim"))


def wide_console() -> Console:
    """Standard output; a file or pipe is as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(_NARROWEST, console.width))


def _terminal_table(table: Table) -> TerminalTable:
    grid = TerminalTable(title=table.title or None, title_justify="left", box=None, padding=(0, 1, 0, 0))
    wraps = sum(len(column.title) for column in table.described) > _LONG_TITLES
    for place, (column, words) in enumerate(zip(table.described, _words(table), strict=True)):
        left = place == 0 or (words and not wraps)
        grid.add_column(column.title, justify="left" if left else "right", no_wrap=place == 0 or not wraps)
    for index, row in enumerate(table.rows):
        cells = [Text(shown(cell, column.form)) for cell, column in zip(row, table.described, strict=True)]
        grid.add_row(*cells, style="red" if index in table.wrong else "")
    return grid


class ProgressBar(Listener):
    """Shows on stderr what is measured and how much of it is done. A context."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Redrawn rarely: the bar must not compute while something is measured.
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._progress.add_task("Starting", total=1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, total: int, what: str) -> None:
        self._progress.reset(self._task, total=total, description=f"Starting {what}")

    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def starting(self, what: str) -> None:
        self._progress.update(self._task, description=f"Starting {what}")

    def finished(self, what: str) -> None:
        self._progress.update(self._task, description=what, advance=1)

    def note(self, sentence: str) -> None:
        self._progress.console.print(sentence, markup=False, highlight=False)


# JSON ------------------------------------------------------------------------------------------------


def json_text(findings: Findings) -> str:
    """The raw figures as one object."""
    return msgspec.json.encode(findings.figures, enc_hook=str).decode()


# A page ----------------------------------------------------------------------------------------------

_WRONG = ' class="fail"'


def page(title: str, heading: Iterable[str], body: str, footer: str = "") -> str:
    """One HTML file without scripts or anything from elsewhere, light and dark. `body` is HTML, the others are text."""
    template = Template((resources.files("orchestrator.lab") / "page.html").read_text(encoding="utf-8"))
    lines = "".join(f'<p class="faint">{escape(line)}</p>' for line in heading)
    return template.substitute(title=escape(title), heading=lines, body=body, footer=escape(footer))


def section(findings: Findings) -> str:
    """The findings as HTML."""
    told = (*findings.conditions, *_meanings(findings.tables), *findings.notes)
    values = _grid(_values_table(findings.values)) if findings.values else ""
    parts = [values, *map(_page_table, findings.tables), _checks(findings.checks)]
    return "".join((*parts, *(f'<p class="faint">{escape(line)}</p>' for line in told)))


def _page_table(table: Table) -> str:
    note = f'<p class="faint">{escape(table.note)}</p>' if table.note else ""
    title = f'<h3>{escape(table.title)} <span class="faint">({table.origin})</span></h3>'
    return f"{title}{_grid(table)}{note}"


def _grid(table: Table) -> str:
    head = "".join(
        f'<th class="text">{escape(column.title)}</th>' if words else f"<th>{escape(column.title)}</th>"
        for column, words in zip(table.described, _words(table), strict=True)
    )
    body = "".join(
        f"<tr{_WRONG if index in table.wrong else ''}>{''.join(map(_cell, row, table.described))}</tr>"
        for index, row in enumerate(table.rows)
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(cell: Cell, column: Column) -> str:
    if isinstance(cell, str):
        return f'<td class="text">{escape(cell)}</td>'
    return f"<td>{'–' if cell is None else shown(cell, column.form)}</td>"


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        f'<tr><td class="{check.status}">{check.status}</td><td class="text">{escape(check.name)}</td>'
        f'<td class="text">{escape(check.text)}{_next(check)}</td></tr>'
        for check in checks
    ]
    return f'<div class="wide"><table>{"".join(rows)}</table></div>' if rows else ""


def _next(check: Check) -> str:
    return f'<br><span class="faint">next: {escape(check.next_step)}</span>' if check.next_step else ""
