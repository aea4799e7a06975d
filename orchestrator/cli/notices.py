"""What a running pipeline tells its user about the draft, on standard error: progress in one line, sentences below."""

import sys
from threading import Lock

import click

from orchestrator.cli.sentences import say
from orchestrator.runtime.notices import Notice

_CLEAR = "\r\033[K"


class Notices:
    """Called with each notice, in another thread.

    A command that prints a text meanwhile shows them at its end: the sentences, and how far the progress came.
    """

    def __init__(self, *, at_once: bool, quiet: bool = False) -> None:
        self._at_once = at_once
        self._quiet = quiet
        self._lock = Lock()
        self._held: list[str] = []
        self._progress = ""

    def __call__(self, notice: Notice) -> None:
        with self._lock:
            if self._quiet:
                return
            if notice.kind == "progress":
                self._show_progress(notice.text)
            elif self._at_once:
                self._clear()
                say(notice.text, err=True)
            else:
                self._progress = ""
                self._held.append(notice.text)

    def close(self) -> None:
        """The pipeline has ended."""
        with self._lock:
            for text in self._held:
                say(text, err=True)
            if self._progress and not self._at_once:
                say(f"{_stage(self._progress)}: not finished, so that the next start does it.", err=True)
            self._clear()
            self._held = []

    def _show_progress(self, text: str) -> None:
        """In place on a terminal; elsewhere a line for each stage, without its steps."""
        before, self._progress = self._progress, text
        if not self._at_once:
            return
        if sys.stderr.isatty():
            click.echo(f"{_CLEAR}{text}", err=True, nl=False)
        elif _stage(text) != _stage(before):
            click.echo(f"{_stage(text)} ...", err=True)

    def _clear(self) -> None:
        if self._progress and self._at_once and sys.stderr.isatty():
            click.echo(_CLEAR, err=True, nl=False)
        self._progress = ""


def _stage(text: str) -> str:
    """The progress without its steps, which change all the time."""
    return text.partition(", ")[0]
