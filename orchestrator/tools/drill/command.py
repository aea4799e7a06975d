"""A `launch-pipeline generate` of a drill's own, as a person starts it, and what it leaves. Knows no messages."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.tools.drill.processes import members, remains, until

_ALL_GONE = 15.0
"""Seconds until all that a command started must be gone, too."""


class GenerateCommand:
    """A running command with a process group of its own, like that of a shell's job."""

    def __init__(self, *arguments: str) -> None:
        self.began = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the command
        self.process = subprocess.Popen(
            [*_program(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        self.mark = f"lp-{self.process.pid}-"
        """What its pipeline's processes and folder contain, and those of no other."""

    def interrupt(self) -> None:
        """Ctrl-C: to every process of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def code(self, seconds: float) -> int | None:
        """The exit code as a shell shows it (128 + signal), or None if it still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            return 128 - code if code < 0 else code
        return None

    def words(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def find(self, program: str, seconds: float) -> int | None:
        """Process id of one of its pipeline's programs, if it comes up within `seconds`."""
        with suppress(TimeoutError):
            return until(lambda: members(self.mark).get(program), seconds)
        return None

    def leftovers(self) -> list[str]:
        """What is left of it after a few seconds."""
        with suppress(TimeoutError):
            until(lambda: not remains(self.mark), _ALL_GONE)
        return remains(self.mark)

    def close(self) -> None:
        """End it the hard way, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


def _program() -> list[str]:
    """What `bin/launch-pipeline` runs, or the installed command where there is no checkout."""
    start = Path(__file__).parents[3] / "bin" / ".start.py"
    if start.is_file():
        return [sys.executable, "-P", "-S", str(start)]
    return [str(Path(sys.executable).with_name("launch-pipeline"))]
