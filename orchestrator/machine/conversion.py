"""Converts a model for Core ML in a separate process. Knows the process's reports, and nothing of Core ML."""

import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

import msgspec

from protocol.contracts.conversion import Choices, ConversionOrder, ConversionReport, Failed, Finished, Progress
from protocol.errors import InputError, PipelineError
from protocol.own_modules import module_command

_GRACE = 5.0
"""Seconds for the process to remove an unfinished conversion."""


def conversion(source: Path, destination: Path, choices: Choices) -> Generator[Progress | Finished, None, None]:
    """Progress as it happens, and the outcome last. Closing it early ends the process.

    Raises InputError or PipelineError with the process's own sentence if the conversion fails.
    """
    order = ConversionOrder(source=str(source), destination=str(destination), choices=choices)
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*module_command("draft_worker.coreml.conversion"), msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
        )
        try:
            yield from _reports(process, words)
        finally:
            _end(process)


def _reports(process: subprocess.Popen[bytes], words: IO[bytes]) -> Generator[Progress | Finished, None, None]:
    assert process.stdout is not None
    for line in process.stdout:
        report: ConversionReport = msgspec.json.decode(line, type=ConversionReport)
        if isinstance(report, Failed):
            raise (InputError if report.input_error else PipelineError)(report.text)
        yield report
        if isinstance(report, Finished):
            return
    words.seek(0)
    last = words.read().decode(errors="replace").strip().splitlines()[-1:]
    raise PipelineError(
        f"The conversion ended unexpectedly; start it again. Its last words: {' '.join(last) or 'none'}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    process.stdout.close()
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
