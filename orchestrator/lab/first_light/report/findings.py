"""What a stage found, and the report of all stages: plain, versioned data."""

from typing import Literal, TypeAlias

import msgspec

FORMAT = 1
"""Raised if a field changes its meaning."""
Origin: TypeAlias = Literal["measured", "computed", "reported"]
"""measured: by this run; computed: from such numbers, by the formula beside it; reported: by others, elsewhere."""
Status: TypeAlias = Literal["done", "failed", "not here", "skipped"]
"""not here: this machine lacks what the stage needs; skipped: there was no time, or the user left it out."""
Cell: TypeAlias = str | int | float | None


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number."""

    name: str
    value: float
    unit: str = ""
    origin: Origin = "measured"
    note: str = ""
    """The formula, or who reported it."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers in rows. The columns' titles have the units. None: there is no such number."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    origin: Origin = "measured"


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that is right, or that is not."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    next_step: str | None = None


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text file that a stage adds to the folder."""

    name: str
    text: str


class Findings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage found."""

    values: tuple[Value, ...] = ()
    tables: tuple[Table, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()


class StageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stage ended, and what it found."""

    format: int = FORMAT
    stage: str
    title: str
    status: Status
    reason: str = ""
    """Why it is not done."""
    seconds: float = 0.0
    findings: Findings = Findings()

    @property
    def good(self) -> bool:
        """Nothing went wrong. What is not here is not wrong."""
        return self.status != "failed" and all(check.status != "fail" for check in self.findings.checks)


class LightReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything, in the order of the stages."""

    format: int = FORMAT
    program: str
    """Version, and commit where it is known."""
    machine: tuple[str, ...]
    options: tuple[str, ...]
    began: str
    """Date and time, UTC."""
    stages: tuple[StageReport, ...]
