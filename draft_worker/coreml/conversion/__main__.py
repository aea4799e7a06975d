"""The converting process: an order as its one argument, reports as lines of JSON on standard output."""

import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

import msgspec

from draft_worker.coreml.conversion.build import convert
from draft_worker.coreml.conversion.lint import lint
from draft_worker.coreml.package import HOST, MODEL
from draft_worker.coreml.program_file import ProgramFile
from draft_worker.coreml.runtime.operations import EXPANSIONS
from protocol.contracts.conversion import ConversionOrder, ConversionReport, Failed, Finished
from protocol.errors import InputError, PipelineError


def main() -> int:
    # Whoever ordered the conversion ends it; the folder that is half made must go then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Standard output is for reports alone, whatever a library may print.
    output, sys.stdout = sys.stdout, sys.stderr
    order = msgspec.json.decode(sys.argv[1], type=ConversionOrder)
    try:
        _say(output, _carry_out(order, output))
    except PipelineError as error:
        return _fail(output, str(error), input_error=isinstance(error, InputError))
    except OSError as error:
        text = f"{order.destination} could not be written ({error}): make room, or name another folder."
        return _fail(output, text, input_error=False)
    return 0


def _carry_out(order: ConversionOrder, output: TextIO) -> Finished:
    began = time.monotonic()
    folder = Path(order.destination)
    package = convert(Path(order.source), folder, order.choices, lambda progress: _say(output, progress))
    file = ProgramFile(folder / MODEL)
    return Finished(
        folder=str(folder),
        package_bytes=sum(part.stat().st_size for part in (folder / MODEL).rglob("*") if part.is_file()),
        host_bytes=(folder / HOST).stat().st_size,
        context=package.context,
        operations={name: _counted(file, name) for name in map(package.function, package.widths)},
        findings=tuple(lint(file)),
        seconds=time.monotonic() - began,
    )


def _counted(file: ProgramFile, function: str) -> dict[str, int]:
    """What runs in each call: expansions of constants don't."""
    kinds = (operation.type for operation in file.functions[function].operations)
    return dict(Counter(kind for kind in kinds if kind not in EXPANSIONS).most_common())


def _fail(output: TextIO, text: str, input_error: bool) -> int:
    _say(output, Failed(text, input_error))
    return 1


def _say(output: TextIO, report: ConversionReport) -> None:
    output.write(msgspec.json.encode(report).decode() + "\n")
    output.flush()


if __name__ == "__main__":
    sys.exit(main())
