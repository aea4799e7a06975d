"""Sentences for people, and prose as it arrives. On a terminal they break between words; elsewhere nothing breaks."""

import os
import re
import sys
from typing import TextIO

import click
from rich.cells import cell_len

_WORD = re.compile(r"\s*(?:`[^`]*`\S*|\S+)")
"""A command in backticks is one word, so that it can be copied whole where it has its place in a line."""


def say(text: str, *, err: bool = False) -> None:
    """Print sentences on stdout, or with `err` on stderr."""
    columns = columns_of(sys.stderr if err else sys.stdout)
    click.echo(text if columns is None else folded(text, columns), err=err)


def folded(text: str, columns: int) -> str:
    """`text` in lines of at most `columns` characters, except for longer words, which a terminal breaks itself."""
    return "\n".join(folded for line in text.split("\n") for folded in _lines(line, columns))


def _lines(line: str, columns: int) -> list[str]:
    lines, current = [], ""
    for word in _WORD.findall(line):
        if current and len(current) + len(word) > columns:
            lines.append(current)
            word = word.lstrip()
        else:
            word = current + word
        current = word
    return [*lines, current]


class Prose:
    """Breaks the lines of a text that comes in pieces, each word as soon as it is complete. Lines of code, in fences or
    indented, and words that are wider than a line stay as they are, so that they can be copied."""

    def __init__(self, columns: int | None) -> None:
        """`columns`: None breaks nothing, and holds nothing back."""
        self._columns = columns
        self._width, self._line, self._word, self._fenced = 0, "", "", False

    def add(self, piece: str) -> str:
        """What is to be printed now."""
        if self._columns is None:
            return piece
        return "".join(self._part(part, self._columns) for part in _PARTS.findall(piece))

    def end(self) -> str:
        """The last word."""
        return "" if self._columns is None else self._placed(self._columns)

    def _part(self, part: str, columns: int) -> str:
        self._line += part
        if part == "\n":
            placed = self._placed(columns)
            self._fenced ^= self._line.lstrip().startswith(_FENCES)
            self._width, self._line = 0, ""
            return placed + part
        # Blanks belong to the word behind them.
        placed = self._placed(columns) if self._word.strip() and part.isspace() else ""
        self._word += part
        return placed

    def _placed(self, columns: int) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        code = self._fenced or self._line.startswith((*_FENCES, "    ", "\t"))
        breaks = self._width and not code and self._width + cell_len(word) > columns
        word = word.lstrip() if breaks else word
        self._width = ((0 if breaks else self._width) + cell_len(word)) % columns or columns
        return f"\n{word}" if breaks else word


_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
_FENCES = ("```", "~~~")


def columns_of(stream: TextIO) -> int | None:
    """Of the terminal that `stream` is; None if it is none, or one without a size."""
    try:
        return (stream.isatty() and os.get_terminal_size(stream.fileno()).columns) or None
    except (OSError, ValueError):
        return None
