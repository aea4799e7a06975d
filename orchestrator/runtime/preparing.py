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

_GRACE = 4.0
"""Seconds for the process to end its own processes and to remove an unfinished conversion."""


class PreparingProcess:
    """Runs from its construction on. Both processes read end of file from a socket pair when the other one ends."""

    def __init__(self, auto: AutoDraft, log: Path) -> None:
        self._life, theirs = socket.socketpair()
        self._log = log
        self._pending = b""
        self._concluded = False
        order = PreparationOrder(auto=auto, life=theirs.fileno())
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
        reports: list[PreparationReport] = [msgspec.json.decode(line, type=PreparationReport) for line in lines]
        self._concluded = self._concluded or any(not isinstance(report, Preparing) for report in reports)
        if not piece and not self._concluded:
            reports.append(Declined(f"its preparation ended unexpectedly; its last words: {self._last_words()}"))
        return reports, not piece

    def terminate(self) -> None:
        """Ask the process to end; `close` follows."""
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
