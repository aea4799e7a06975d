"""Runs the target's programs that import MLX, in processes of their own, and reads their reports."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from orchestrator.machine.hardware import worker_environment
from protocol.errors import PipelineError
from protocol.own_modules import module_command

Report = TypeVar("Report")


def reports(module: str, order: Any, form: type[Report]) -> Iterator[Report]:
    """The reports of a program with this order as its argument, as they come, one JSON object a line.

    Raises PipelineError if the process fails.
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*module_command(module), msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            env=target_environment(),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=form)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code:
            words.seek(0)
            raise PipelineError(f"The process that compares forwards failed: {last_words(words.read())}")


def target_environment() -> dict[str, str]:
    """This process's environment variables, and those of a target."""
    return {**os.environ, **worker_environment("target", ())}


def last_words(words: bytes) -> str:
    """The last line of a process's standard error."""
    return (words.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
