"""Where a chat is shown: on a terminal, rendered, or as plain lines in and plain text out."""

import sys
import termios
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import confirm
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from orchestrator.cli.printing import READING
from protocol.security.private_files import private_folder, read_private, write_private

_REDRAWS = 8
"""A second; rendering costs more the longer an answer is."""


@contextmanager
def screen(history: Path | None) -> Iterator["Screen"]:
    """`history`: a file for the lines that are typed on a terminal, or None."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield Plain()
        return
    before = termios.tcgetattr(sys.stdin)
    input_flags, output_flags, control_flags, local_flags, *rest = before
    # What is typed while models load or an answer comes waits for the next line. Its echo would be overwritten by what
    # is drawn then, and the terminal's own line editor drops what is longer than 4,095 bytes.
    input_flags &= ~termios.ICRNL
    local_flags &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, [input_flags, output_flags, control_flags, local_flags, *rest])
    try:
        yield Terminal(history)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class Plain:
    """For scripts: a line is a message, its answer is text, everything else goes to stderr."""

    lasting = False
    """Whether the chat goes on after a mistake or a stopped answer."""

    def ask(self) -> str | None:
        """The next message; None at the end. Raises KeyboardInterrupt for Ctrl-C on an empty line."""
        message: list[str] = []
        for line in iter(sys.stdin.readline, ""):
            text = line.rstrip("\r\n")
            message.append(text.removesuffix("\\"))
            if not text.endswith("\\"):
                break
        return "\n".join(message) if message else None

    def note(self, words: str, wrong: bool = False) -> None:
        print(words, file=sys.stderr)

    def confirm(self, question: str) -> bool:
        """Without a terminal nobody says yes."""
        return False

    def answering(self) -> "PlainAnswer":
        return PlainAnswer()


class PlainAnswer:
    """A context for one answer: `show` gets what there is so far, or `status` alone before its first word; `finish`
    gets all of it."""

    def __init__(self) -> None:
        self._told = 0

    def __enter__(self) -> "PlainAnswer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, text: str, status: str) -> None:
        # White space at the end may turn out to be the answer's end, which is not shown.
        certain = text.rstrip()
        print(certain[self._told :], end="", flush=True)
        self._told = max(self._told, len(certain))

    def finish(self, text: str, status: str) -> None:
        print(text[self._told :], flush=True)


class Terminal:
    """For people."""

    lasting = True

    def __init__(self, history: Path | None) -> None:
        self._console = Console()
        self._session = prompt_session(history)

    def ask(self) -> str | None:
        try:
            return self._session.prompt("› ")
        except EOFError:
            return None

    def note(self, words: str, wrong: bool = False) -> None:
        self._console.print(words, style="red" if wrong else "dim", markup=False, highlight=False)

    def confirm(self, question: str) -> bool:
        return confirm(question)

    def answering(self) -> "LiveAnswer":
        return LiveAnswer(self._console)


class LiveAnswer:
    """As PlainAnswer. Markdown that grows, above a status line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting = Spinner("dots", READING)
        self._live = Live(self._waiting, console=console, refresh_per_second=_REDRAWS, transient=True)

    def __enter__(self) -> "LiveAnswer":
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, text: str, status: str) -> None:
        self._waiting.update(text=status)
        self._live.update(Group(_End(text), Text(status, style="dim")) if text else self._waiting)

    @property
    def shown(self) -> RenderableType:
        """What the next redraw writes."""
        return self._live.renderable

    def finish(self, text: str, status: str) -> None:
        self._live.stop()
        self._console.print(Markdown(text))
        self._console.print(Text(status, style="dim"))


Screen: TypeAlias = Plain | Terminal


class _End:
    """The last lines of a Markdown text, as many as the screen has room for. None is wider than the screen, however
    its terminal counts emoji: a line that wraps there is not overwritten by the next redraw."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(3, console.height - 3)
        width = options.max_width
        while True:
            lines = console.render_lines(Markdown(self._text), options.update(width=width), pad=False)[-room:]
            excess = max((_widest(line) for line in lines), default=0) - options.max_width
            if excess <= 0 or width == _NARROWEST:
                break
            width = max(_NARROWEST, width - excess)
        for line in lines:
            yield from line if _widest(line) <= options.max_width else [Segment("…")]
            yield Segment.line()


_NARROWEST = 4
_BESIDE, _PICTURES = "\ufe0f", 0x1F000


def _widest(line: Iterable[Segment]) -> int:
    """Columns of a line on a terminal that shows every part of a joined emoji by itself."""
    return sum(_columns(character) for segment in line for character in segment.text)


def _columns(character: str) -> int:
    if character == _BESIDE:
        return 1  # What it follows is two columns wide on some terminals.
    wide = ord(character) >= _PICTURES or unicodedata.east_asian_width(character) in "WF"
    return 2 if wide else cell_len(character)


def prompt_session(history: Path | None) -> PromptSession[str]:
    """Enter sends; Alt-Enter, or Enter after a backslash, begins a new line. `history` is made if it does not exist.

    Raises InputError for a history that other users could read.
    """
    known = InMemoryHistory() if history is None else FileHistory(str(_private(history)))
    return PromptSession(
        history=known, multiline=True, key_bindings=_keys(), prompt_continuation=lambda width, *_: " " * width
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


def _private(file: Path) -> Path:
    private_folder(file.parent)
    if read_private(file) is None:
        write_private(file, b"", replace=False)
    return file
