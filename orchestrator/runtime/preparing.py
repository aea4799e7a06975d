"""The process that prepares the draft for the Neural Engine, as the orchestrator holds it."""

import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from orchestrator.machine.child_process import ChildProcess
from orchestrator.machine.drafts.auto_draft import AutoDraft
from orchestrator.machine.drafts.preparation import Declined, PreparationOrder, PreparationReport, Preparing
from protocol.own_modules import module_command

_GRACE = 7.0
"""Seconds for the process to end its own processes and to remove an unfinished conversion: it gives the latter 5 s."""


class PreparingProcess:
    """Runs from its construction on. Both processes read end of file from a socket pair when the other one ends."""

    def __init__(self, auto: AutoDraft, needed: int, log: Path) -> None:
        """`needed`: bytes that the pipeline needs without Core ML."""
        self._life, theirs = socket.socketpair()
        self._concluded = False
        order = PreparationOrder(auto=auto, needed=needed, life=theirs.fileno())
        command = [*module_command("orchestrator.machine.drafts.preparation"), msgspec.json.encode(order).decode()]
        with theirs:
            self._process = ChildProcess(command, inherited=[theirs.fileno()], words=log.open("w+b"))

    def fileno(self) -> int:
        """Readable when `read` has something to read."""
        return self._process.fileno()

    def read(self) -> tuple[list[PreparationReport], bool]:
        """The next reports, and whether they were the last ones."""
        lines = self._process.read()
        reports = [report for line in lines or () if (report := _report(line)) is not None]
        self._concluded = self._concluded or any(not isinstance(report, Preparing) for report in reports)
        if lines is None and not self._concluded:
            words = self._process.last_words
            reports.append(Declined(f"its preparation ended unexpectedly; its last words: {words}"))
        return reports, lines is None

    def terminate(self) -> None:
        """Ask the process to end. `close` follows."""
        self._process.terminate()

    def close(self) -> None:
        """End the process and all that it has started."""
        with self._life, self._process as process:
            process.end(_GRACE)


def _report(line: bytes) -> PreparationReport | None:
    """None for a line that a library printed."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=PreparationReport)
    return None
