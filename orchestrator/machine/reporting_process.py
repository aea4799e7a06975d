"""A program of ours that does one long job and reports on standard output, a line of JSON each.

Knows neither the job nor its reports.
"""

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import msgspec

from protocol.child_process import NO_VARIABLES, ChildProcess
from protocol.contracts.coreml.conversion import Failed
from protocol.errors import InputError, PipelineError
from protocol.own_modules import module_command

_Report = TypeVar("_Report")


def reports(
    module: str,
    order: msgspec.Struct,
    report: Any,
    last: tuple[type[_Report], ...] = (),
    *,
    name: str,
    grace: float = 0.0,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> Generator[Any, None, None]:
    """Run `python -m module ORDER`; its reports, of the union type `report`, up to one of the types `last`, or to its
    end with exit code 0.

    Closing the generator early asks the process to end and gives it `grace` seconds to put its files in order. Raises
    InputError or PipelineError with the process's own sentence if the job fails. `name`: such as "The conversion".
    """
    command = [*module_command(module), msgspec.json.encode(order).decode()]
    with ChildProcess(command, variables=variables, session=False) as process:
        try:
            while (line := process.line()) is not None:
                try:
                    found = msgspec.json.decode(line, type=report)
                except msgspec.DecodeError:
                    break
                if isinstance(found, Failed):
                    raise (InputError if found.input_error else PipelineError)(found.text)
                yield found
                if isinstance(found, last):
                    return
            if last or process.wait(grace) != 0:
                raise PipelineError(f"{name} ended unexpectedly; start it again. Its last words: {process.last_words}")
        finally:
            process.end(grace)
