"""The table of what each draft guesses alone, and the same as JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator.lab.bench.acceptance import ExaminedDrafter
from protocol.contracts.training import DEPTHS

_SHOWN = (0, 1, 2, 4, 8)
"""Tokens without features; --json has all."""
_NOTE = (
    "Each draft alone, asked along the texts of this bench, with their noise. Guess n: share of right ones where all "
    "guesses in front are right. Late: tokens before the root whose features the draft does not know yet; a draft that "
    "reads tokens alone is never late. ms: of one guess behind the other, unpaced, on this machine's processor or GPU."
)


def table(drafters: Sequence[ExaminedDrafter]) -> Group:
    """A row for each draft, temperature and lateness."""
    shown = Table(title="Guesses of the drafts", title_justify="left")
    shown.add_column("draft")
    for name in ("M read", "ms", "T", "places", "late", *(f"guess {depth + 1}" for depth in range(DEPTHS))):
        shown.add_column(name, justify="right")
    for drafter in drafters:
        read = "" if drafter.parameters is None else f"{drafter.parameters / 1e6:.1f}"
        facts = [drafter.found.name, read, f"{1000 * drafter.found.seconds_per_guess:.1f}"]
        for each in drafter.found.acceptance:
            for late in (late for late in _SHOWN if late < len(each.rates)):
                heading = [f"{each.temperature:g}", str(each.places)] if late == 0 else ["", ""]
                rates = ("" if rate is None else f"{rate:.3f}" for rate in each.rates[late])
                shown.add_row(*facts, *heading, str(late), *rates)
                facts = ["", "", ""]
        shown.add_section()
    return Group(shown, Text(_NOTE, style="dim"))


def to_json(drafters: Sequence[ExaminedDrafter]) -> list[dict[str, Any]]:
    return [{**msgspec.to_builtins(drafter.found), "parameters_per_guess": drafter.parameters} for drafter in drafters]
