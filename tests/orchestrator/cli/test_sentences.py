"""Laws of sentences on a terminal: they break between words, and a command that has its place is whole."""

import os
import struct
import sys
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest
from rich.cells import cell_len

from orchestrator.cli import app
from orchestrator.cli.sentences import Prose, folded

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


CODE = """```python
values = [one_value for one_value in range(100) if one_value % 7 and one_value % 11]
```
    indented = code + that + stays + as + it + is + however + long + it + may + be
"""
ANSWER = f"""The sky is blue because 空気 scatters short waves 天気.

{CODE}See https://example.org/a/long/address/that/is/one for 空の色 more.
"""


@pytest.mark.parametrize("columns", [12, 40, 80])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_prose_breaks_between_words_however_it_arrives_and_code_stays(columns: int, size: int):
    prose = Prose(columns)
    shown = "".join(prose.add(ANSWER[at : at + size]) for at in range(0, len(ANSWER), size)) + prose.end()

    assert CODE in shown
    assert shown.split() == ANSWER.split()
    lines = shown.replace(CODE, "").splitlines()
    assert all(cell_len(line.rstrip()) <= columns for line in lines if not line.startswith("https"))


def test_prose_in_a_pipe_is_what_arrives():
    prose = Prose(None)

    assert [prose.add(piece) for piece in ("on", "e tw", "o")] == ["on", "e tw", "o"]
    assert prose.end() == ""
