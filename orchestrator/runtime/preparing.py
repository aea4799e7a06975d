"""The process that prepares the draft for the Neural Engine, as the orchestrator holds it."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

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
        self._log = log
        self._pending = b""
        self._concluded = False
        self._terminated = False
        order = PreparationOrder(auto=auto, needed=needed, life=theirs.fileno())
        with theirs, log.open("wb") as words:
            self._process = subprocess.Popen(
                [*module_command("orchestrator.machine.drafts.preparation"), msgspec.json.encode(order).decode()],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=words,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def fileno(self) -> int:
        """Readable when `read` has something to read."""
        return self._output.fileno()

    def read(self) -> tuple[list[PreparationReport], bool]:
        """The next reports, and whether they were the last ones."""
        piece = os.read(self._output.fileno(), 1 << 16)
        *lines, self._pending = (self._pending + piece).split(b"\n")
        reports = [report for line in lines if (report := _report(line)) is not None]
        self._concluded = self._concluded or any(not isinstance(report, Preparing) for report in reports)
        if not piece and not self._concluded:
            reports.append(Declined(f"its preparation ended unexpectedly; its last words: {self._last_words()}"))
        return reports, not piece

    def terminate(self) -> None:
        """Ask the process to end, once: a second signal would interrupt its cleaning up. `close` follows."""
        if self._terminated:
            return
        self._terminated = True
        with suppress(ProcessLookupError):
            self._process.terminate()

    def close(self) -> None:
        """End the process and all that it has started."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        self._life.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-1:] if self._log.exists() else []
        return " ".join(lines) or "none"


def _report(line: bytes) -> PreparationReport | None:
    """None for a line that a library printed."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=PreparationReport)
    return None
