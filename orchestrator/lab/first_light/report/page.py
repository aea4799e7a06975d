"""The page of a first light: one HTML file without scripts or anything from elsewhere, light and dark. Pure."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from orchestrator.lab.first_light.report.findings import Cell, Check, LightReport, StageReport, Table, Value

_HEIGHT, _WIDTH = 130, 640
_FEWEST_BARS, _MOST_BARS = 4, 40
"""Rows of a table that is also drawn."""


def page(report: LightReport) -> str:
    """The whole file."""
    template = Template(
        (resources.files("orchestrator.lab.first_light.report") / "page.html").read_text(encoding="utf-8")
    )
    heading = [report.program, *report.machine, f"begun {report.began}; {'; '.join(report.options)}"]
    return template.substitute(
        heading="".join(f'<p class="faint">{escape(line)}</p>' for line in heading),
        summary=_summary(report.stages),
        stages="".join(map(_stage, report.stages)),
    )


def _summary(stages: Iterable[StageReport]) -> str:
    rows = [
        f'<tr><td><a href="#{stage.stage}">{escape(stage.title)}</a></td>'
        f'<td class="{_look(stage)}">{_state(stage)}</td><td class="text faint">{escape(_result(stage))}</td></tr>'
        for stage in stages
    ]
    return f"<table>{''.join(rows)}</table>"


def _stage(stage: StageReport) -> str:
    found = stage.findings
    parts = [
        f'<h2 id="{stage.stage}">{escape(stage.title)}</h2>',
        f'<p class="{_look(stage)}">{_state(stage)}{": " if stage.reason else ""}{escape(stage.reason)}</p>',
        _values(found.values),
        *map(_table, found.tables),
        _checks(found.checks),
        *(f'<p class="faint">{escape(note)}</p>' for note in found.notes),
    ]
    return f'<div class="card">{"".join(parts)}</div>'


def _look(stage: StageReport) -> str:
    if stage.status in ("not here", "skipped"):
        return "absent"
    return "done" if stage.good else "failed"


def _state(stage: StageReport) -> str:
    if stage.status != "done":
        return stage.status
    return f"{'done' if stage.good else 'found something wrong'}, {stage.seconds:.0f} s"


def _result(stage: StageReport) -> str:
    """One line: the reason, what is wrong, or the first of this machine's numbers, or of its checks."""
    checks = stage.findings.checks
    wrong = [check for check in checks if check.status == "fail"]
    own = [value for value in stage.findings.values if value.origin != "reported"]
    if stage.reason or wrong:
        return stage.reason or f"{wrong[0].name}: {wrong[0].text}"
    if own:
        return f"{own[0].name}: {_number(own[0].value)} {own[0].unit}"
    if len(checks) == 1:
        return checks[0].text
    warnings = sum(check.status == "warn" for check in checks)
    return f"{len(checks)} checks, {warnings} warnings" if checks else ""


def _values(values: Sequence[Value]) -> str:
    rows = [(value.name, value.value, value.unit, value.origin, value.note) for value in values]
    return _grid(("", "", "unit", "origin", ""), rows) if rows else ""


def _table(table: Table) -> str:
    note = f'<p class="faint">{escape(table.note)}</p>' if table.note else ""
    title = f'<h3>{escape(table.title)} <span class="faint">({table.origin})</span></h3>'
    return f"{title}{_bars(table)}{_grid(table.columns, table.rows)}{note}"


def _grid(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    shown = list(rows)
    words = [bool(shown) and all(isinstance(row[place], str) for row in shown) for place in range(len(columns))]
    head = "".join(
        f'<th class="text">{escape(column)}</th>' if text else f"<th>{escape(column)}</th>"
        for column, text in zip(columns, words, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f'<td class="text">{escape(cell)}</td>'
    return f"<td>{'–' if cell is None else _number(cell)}</td>"


def _number(value: float) -> str:
    """Four digits that mean something; whole numbers whole."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _checks(checks: Sequence[Check]) -> str:
    rows = [
        f'<tr><td class="{check.status}">{check.status}</td><td class="text">{escape(check.name)}</td>'
        f'<td class="text">{escape(check.text)}{_next(check)}</td></tr>'
        for check in checks
    ]
    return f'<div class="wide"><table>{"".join(rows)}</table></div>' if rows else ""


def _next(check: Check) -> str:
    return f'<br><span class="faint">next: {escape(check.next_step)}</span>' if check.next_step else ""


def _bars(table: Table) -> str:
    """The second column by the first, if both are numbers in all rows."""
    points = [(row[0], row[1]) for row in table.rows if len(row) > 1]
    numbers = [(x, y) for x, y in points if isinstance(x, int | float) and isinstance(y, int | float)]
    if len(numbers) != len(table.rows) or not _FEWEST_BARS <= len(numbers) <= _MOST_BARS:
        return ""
    highest = max(y for _, y in numbers) or 1.0
    slot = _WIDTH / len(numbers)
    parts = [f'<line x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>']
    for index, (x, y) in enumerate(numbers):
        height = max(0.0, y) / highest * (_HEIGHT - 18)
        left, middle = index * slot + slot * 0.1, (index + 0.5) * slot
        box = f'x="{left:.1f}" y="{_HEIGHT - height:.1f}" width="{slot * 0.8:.1f}" height="{height:.1f}"'
        parts.append(f"<rect {box}><title>{escape(table.columns[0])} {x:g}: {y:.4g}</title></rect>")
        parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{x:g}</text>')
        if len(numbers) <= _MOST_BARS // 2:
            parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - height - 4:.1f}" text-anchor="middle">{y:.3g}</text>')
    label = escape(f"{table.columns[1]} by {table.columns[0]}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 22}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
