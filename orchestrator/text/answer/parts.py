"""The parts of an answer, and the interface of the parsers that find them. Pure."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's thought."""

    text: str


@dataclass(frozen=True)
class Spoken:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True)
class Call:
    """A tool call. `Arguments` follow, up to the last ones."""

    name: str
    arguments: str
    """The beginning of a JSON object."""
    id: str | None = None
    """The id that the model gave it, in formats that have one."""


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the call before. They are no JSON if the model wrote none, or no end."""

    text: str
    last: bool = False


Part: TypeAlias = Reasoning | Spoken | Call | Arguments


class ThoughtSpan(NamedTuple):
    """Where a thought is in the output, markers included. In characters."""

    begin: int
    end: int | None = None
    """None while the model still thinks, or may do so."""


class ThoughtJoiner:
    """The reasoning of an answer as one text: a blank line between two thoughts."""

    def __init__(self) -> None:
        self._begun = False
        self._inside = False

    def push(self, part: Part) -> Part:
        inside, self._inside = self._inside, isinstance(part, Reasoning)
        if not isinstance(part, Reasoning):
            return part
        apart = self._begun and not inside
        self._begun = True
        return Reasoning("\n\n" + part.text) if apart else part
