"""Runs a system's program that manages services, and says what its refusal means for the user."""

import subprocess
from collections.abc import Sequence

from protocol.errors import PipelineError

_BY_HAND = "`launch-pipeline serve` runs in a terminal all the same"


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Its exit code and its words. Raises PipelineError if there is no such program."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PipelineError(f"{command[0]} can't be started ({error.strerror}): {_BY_HAND}.") from error


def require(command: Sequence[str], next_step: str) -> None:
    """Raises PipelineError with the program's last line and `next_step` if it refuses."""
    done = run(command)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise PipelineError(f"`{' '.join(command)}` failed ({lines[-1].strip().rstrip('.')}): {next_step}.")
