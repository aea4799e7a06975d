"""A process of the draft worker's package that does one long job and reports on standard output, a line of JSON each.

Knows neither the job nor its reports.
"""

import os
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from typing import IO, Any, TypeVar

import msgspec

from protocol.contracts.coreml.conversion import Failed
from protocol.errors import InputError, PipelineError
from protocol.own_modules import module_command

_Report = TypeVar("_Report")


def reports(
    module: str,
    order: msgspec.Struct,
    report: Any,
    last: tuple[type[_Report], ...],
    *,
    name: str,
    grace: float,
    environment: Mapping[str, str] | None = None,
) -> Generator[Any, None, None]:
    """Run `python -m module ORDER`; its reports, of the union type `report`, up to one of the types `last`.

    Closing the generator early asks the process to end and gives it `grace` seconds to put its files in order. Raises
    InputError or PipelineError with the process's own sentence if the job fails. `name`: such as "The conversion".
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*module_command(module), msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            env={**os.environ, **(environment or {})},
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    found = msgspec.json.decode(line, type=report)
                except msgspec.DecodeError:
                    # Killed in the middle of a line.
                    break
                if isinstance(found, Failed):
                    raise (InputError if found.input_error else PipelineError)(found.text)
                yield found
                if isinstance(found, last):
                    return
            raise PipelineError(f"{name} ended unexpectedly; start it again. Its last words: {_last_words(words)}")
        finally:
            _end(process, grace)


def _last_words(words: IO[bytes]) -> str:
    words.seek(0)
    return " ".join(words.read().decode(errors="replace").strip().splitlines()[-1:]) or "none"


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    process.terminate()
    try:
        # A process that can't write its reports would end before its files are in order, so they are read.
        process.communicate(timeout=grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
