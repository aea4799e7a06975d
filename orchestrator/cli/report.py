"""Results as text for the user: the summary of a generation, findings, tables that are never cut."""

from collections.abc import Iterable
from typing import Protocol

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.api.result import Result
from protocol.messages.client import Pace, Statistics

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
    yield "draft busy", f"{_percent(figures.draft_busy)}, {_percent(figures.wasted_draft_share)} of it in vain"
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
