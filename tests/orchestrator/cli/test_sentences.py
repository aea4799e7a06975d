"""Laws of sentences on a terminal: they break between words, and a command that has its place is whole."""

import os
import struct
import sys
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest

from orchestrator.cli import app
from orchestrator.cli.sentences import folded

TEXT = "Error: No pipeline here accepts workers of other machines: start one with `launch-pipeline workers list`."
WRONG = (
    "Error: Invalid value for '--max-tokens': 'none' is not a valid integer range. "
    "See `launch-pipeline generate --help`."
)


@pytest.mark.parametrize("columns", [12, 40, 80])
def test_no_word_is_broken_and_none_is_lost(columns: int):
    lines = folded(TEXT, columns).split("\n")

    assert " ".join(lines) == TEXT
    assert all(len(line) <= columns or line.startswith("`") or " " not in line for line in lines)
    assert any("`launch-pipeline workers list`" in line for line in lines)


def test_lines_and_their_indents_stay():
    assert folded("Two lines:\n\n  a b", 80) == "Two lines:\n\n  a b"


def test_a_longer_word_has_a_line_of_its_own():
    assert folded("in /a/folder/somewhere now", 10) == "in\n/a/folder/somewhere\nnow"


@pytest.mark.parametrize("columns", [40, None])
def test_an_error_breaks_between_words_on_a_terminal_alone(columns: int | None, monkeypatch: pytest.MonkeyPatch):
    """None: stderr is a pipe."""
    reader, writer = os.pipe() if columns is None else os.openpty()
    if columns is not None:
        ioctl(writer, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setattr(sys, "argv", ["launch-pipeline", "generate", "--max-tokens", "none", "hi"])
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit):
            app.main()
    told = os.read(reader, 4096).decode().splitlines()
    os.close(reader)

    assert " ".join(told) == WRONG
    assert len(told) == (1 if columns is None else 3)
    assert columns is None or all(len(line) <= columns for line in told)
