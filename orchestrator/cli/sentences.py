"""Sentences for people. On a terminal they break between words; elsewhere nothing breaks."""

import os
import re
import sys
from typing import TextIO

import click

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


def columns_of(stream: TextIO) -> int | None:
    """Of the terminal that `stream` is; None if it is none, or one without a size."""
    try:
        return (stream.isatty() and os.get_terminal_size(stream.fileno()).columns) or None
    except (OSError, ValueError):
        return None
