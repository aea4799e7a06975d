"""The output of `bench reuse`: a table and one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.results.report import machine_lines
from orchestrator.lab.bench.workloads.prefix_reuse import CONTENDERS, Turn, turns_kept_pace
from orchestrator.lab.bench.workloads.transcript import TranscriptShape

_FOOTNOTE = """\
first token, draft's growth: milliseconds from the request's arrival at the orchestrator to the first token, and to \
the draft's first nodes (in the turns that had not ended by then). Median, 90th percentile, last turn; without the \
first turn, which has nothing to reuse. evaluated: prompt tokens that the target evaluated. exact: the tokens equal \
those without reuse. shared memory alone: the target adopts arenas; the draft prefills every prompt."""
_TITLES = ("first token", "p90", "last", "evaluated", "draft's growth", "last", "in turns", "exact")


def table(turns: Sequence[Turn], shape: TranscriptShape, plan: BenchPlan) -> Group:
    """One line a contender, then the settings, the machine and the definitions."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for index, title in enumerate(("", *_TITLES)):
        grid.add_column(title, justify="right" if index else "left")
    for name in CONTENDERS:
        mine = [turn for turn in turns if turn.contender == name]
        grid.add_row(*_cells(summary(mine)), style="" if turns_kept_pace(mine) else "red")
    pace = f" Paced as {plan.pace}." if plan.pace else ""
    scope = (
        f"{shape.turns} turns: {shape.first:,} tokens, then {shape.added} more after each answer of {shape.answer}, "
        f"up to {shape.longest:,}; temperature {plan.temperatures[0]:g}, {plan.repeats} repeats.{pace}"
    )
    return Group(grid, Text("\n".join([scope, *machine_lines(), _FOOTNOTE]), style="dim"))


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures of one contender's turns without the first turn. Times in seconds."""
    later = [turn for turn in turns if turn.number > 1]
    last = max(turn.number for turn in turns)
    firsts = [turn.first_token for turn in later]
    grown = [turn for turn in later if turn.draft_growth is not None]
    growths = [turn.draft_growth for turn in grown if turn.draft_growth is not None]
    final = [turn.draft_growth for turn in grown if turn.number == last and turn.draft_growth is not None]
    return {
        "contender": turns[0].contender,
        "first_token": median(firsts),
        "first_token_p90": quantiles(firsts, n=10)[-1] if len(firsts) > 1 else firsts[0],
        "first_token_last": median(turn.first_token for turn in later if turn.number == last),
        "evaluated": sum(turn.prompt_tokens - 1 - turn.adopted for turn in later),
        "adopted": sum(turn.adopted for turn in later),
        "growth": median(growths) if growths else None,
        "growth_last": median(final) if final else None,
        "grew": len(growths),
        "draft_evaluated": sum(turn.prompt_tokens - 1 - turn.draft_adopted for turn in grown),
        "exact": all(turn.exact for turn in turns),
        "representative": turns_kept_pace(turns),
    }


def to_json(turns: Sequence[Turn], shape: TranscriptShape, plan: BenchPlan) -> dict[str, Any]:
    """The machine, the settings, the transcript's shape, every contender's figures and every turn."""
    return {
        "machine": machine_lines(),
        "settings": msgspec.to_builtins(asdict(plan)),
        "shape": {**asdict(shape), "longest": shape.longest},
        "results": [summary([turn for turn in turns if turn.contender == name]) for name in CONTENDERS],
        "turns": [msgspec.to_builtins(asdict(turn)) for turn in turns],
    }


def invalid(turns: Sequence[Turn]) -> list[str]:
    """A sentence for each contender that did not keep its pace."""
    return [
        f"{name} is invalid: more than 1% of its forwards took longer than the profile's device would. "
        "Use a quieter machine, or a slower profile."
        for name in CONTENDERS
        if not turns_kept_pace([turn for turn in turns if turn.contender == name])
    ]


def failures(turns: Sequence[Turn]) -> list[str]:
    """A sentence for each turn whose tokens are wrong."""
    return [
        f"{turn.contender}, turn {turn.number}: the tokens differ from those without reuse."
        for turn in turns
        if not turn.exact
    ]


def _cells(figures: dict[str, Any]) -> list[str]:
    name = figures["contender"] + ("" if figures["representative"] else " (INVALID)")
    times = [_milliseconds(figures[key]) for key in ("first_token", "first_token_p90", "first_token_last")]
    growth = [_milliseconds(figures[key]) for key in ("growth", "growth_last")]
    exact = "yes" if figures["exact"] else "NO"
    return [name, *times, f"{figures['evaluated']:,}", *growth, f"{figures['grew']:,}", exact]


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:,.0f}"
