"""A `launch-pipeline generate` process of a drill, and what it leaves behind. Knows no messages."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.lab.drill.processes import members, remains, until

_CLEANUP_SECONDS = 15.0
"""Time in which everything that a command started must end."""
_ARGUMENTS = ("generate", "import os", "--quiet", "--draft-engine", "mlx")
"""The automatic engine would begin to convert the draft on a Mac, and print a line about it."""


class GenerateCommand:
    """A running command in a process group of its own, like a shell's job."""

    def __init__(self, max_tokens: int) -> None:
        self.began = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the command
        self.process = subprocess.Popen(
            [*_program(), *_ARGUMENTS, "--max-tokens", str(max_tokens)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        self.mark = f"lp-{self.process.pid}-"
        """A text in the command lines and the folder of its pipeline, and of no other pipeline."""

    def interrupt(self) -> None:
        """SIGINT to every process of the group, like Ctrl-C."""
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

    def errors(self) -> str:
        """Its output on stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def find(self, program: str, seconds: float) -> int | None:
        """Process id of one of its pipeline's programs; None if it does not start within `seconds`."""
        with suppress(TimeoutError):
            return until(lambda: members(self.mark).get(program), seconds)
        return None

    def leftovers(self) -> list[str]:
        """Processes, folders and segments that remain after `_CLEANUP_SECONDS`."""
        with suppress(TimeoutError):
            until(lambda: not remains(self.mark), _CLEANUP_SECONDS)
        return remains(self.mark)

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


def _program() -> list[str]:
    """The program of `bin/launch-pipeline`, or the installed command outside a checkout."""
    start = Path(__file__).parents[3] / "bin" / ".start.py"
    if start.is_file():
        return [sys.executable, "-P", "-S", str(start)]
    return [str(Path(sys.executable).with_name("launch-pipeline"))]
