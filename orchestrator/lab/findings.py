"""What a measurement found: plain data, whatever was measured. `report` shows it; a measurement draws nothing.

A measurement is a function that returns Findings. A column is one `Field` in one place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from orchestrator.machine.check import Check

Cell: TypeAlias = str | int | float | tuple[float, ...] | None
"""Two numbers are an interval, three a median and its interval. None: there is no such figure."""
R = TypeVar("R")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number."""

    name: str
    value: float
    unit: str = ""


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    """With the unit."""
    form: str = ""
    """Python's format of its numbers; empty: four digits that mean something."""
    meaning: str = ""
    """One sentence without a full stop, shown below the tables."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures in rows. A column that is only a title has numbers of four digits."""

    title: str
    columns: tuple[str | Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    origin: Literal["measured", "computed"] = "measured"
    wrong: tuple[int, ...] = ()
    """Rows whose figures mean nothing, by index."""

    @property
    def described(self) -> list[Column]:
        """Every column, with its format."""
        return [Column(each) if isinstance(each, str) else each for each in self.columns]


@dataclass(frozen=True)
class Field(Generic[R]):
    """A column and how it is read from a row's record: all that there is to say about it."""

    title: str
    read: Callable[[R], Cell]
    form: str = ""
    meaning: str = ""
    scale: float = 1.0
    """Factor from the record's unit to the column's."""
    always: bool = False
    """It is also shown of a row with a mark."""

    def cell(self, record: R) -> Cell:
        value = self.read(record)
        if isinstance(value, tuple):
            return tuple(self.scale * each for each in value)
        return value if value is None or isinstance(value, str) or self.scale == 1.0 else self.scale * value


def tabulated(
    title: str,
    fields: Sequence[Field[R]],
    records: Sequence[R],
    mark: Callable[[R], str] = lambda _: "",
    wrong: Callable[[R], bool] | None = None,
    note: str = "",
) -> Table:
    """A row a record. `mark`: a word that stands in place of the first figure, such as WRONG; the other figures of such
    a row are left out. `wrong`: rows that the reader must not trust; by default those with a mark."""

    def row(record: R) -> tuple[Cell, ...]:
        words = iter((mark(record),)) if mark(record) else None
        return tuple(field.cell(record) if words is None or field.always else next(words, "") for field in fields)

    distrusted = wrong or (lambda record: bool(mark(record)))
    return Table(
        title=title,
        columns=tuple(Column(field.title, field.form, field.meaning) for field in fields),
        rows=tuple(map(row, records)),
        note=note,
        wrong=tuple(index for index, record in enumerate(records) if distrusted(record)),
    )


class AttachedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text file beside the findings."""

    name: str
    text: str


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To a question that was open until this measurement."""

    question: str
    """Its name."""
    text: str
    """One sentence, or a few."""


class Findings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a measurement found."""

    title: str = ""
    conditions: tuple[str, ...] = ()
    """What the figures depend on: settings, machine, libraries."""
    values: tuple[Value, ...] = ()
    tables: tuple[Table, ...] = ()
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    notes: tuple[str, ...] = ()
    attachments: tuple[AttachedFile, ...] = ()
    figures: dict[str, Any] = {}
    """For programs: the raw figures as JSON values."""

    @property
    def good(self) -> bool:
        return all(check.status != "fail" for check in self.checks)


class Listener:
    """Hears how a measurement goes on. This one tells nobody."""

    def begin(self, total: int, what: str) -> None:
        """Another count of steps begins, with the start of `what`."""

    def total(self, total: int) -> None:
        """Correct the number of steps."""

    def starting(self, what: str) -> None:
        """Something is loaded that takes a while."""

    def finished(self, what: str) -> None:
        """A step of this name is done."""

    def note(self, sentence: str) -> None:
        """The user should know this now."""
