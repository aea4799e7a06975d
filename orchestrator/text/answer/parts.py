"""The parts of an answer, and the interface of the parsers that find them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


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
    """A complete tool call."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """The id that the model gave it, in formats that have one."""


Part: TypeAlias = Reasoning | Spoken | Call


class AnswerParser(Protocol):
    """Parses one answer. The borders between the pieces of its text do not change the parts."""

    @property
    def answer_start(self) -> int | None:
        """Characters of output before the answer, the reasoning's; None while the model still thinks."""
        ...

    def push(self, text: str) -> Sequence[Part]:
        """The parts that are certain now."""
        ...

    def finish(self) -> Sequence[Part]:
        """The parts that were held back, at the end of the output."""
        ...
