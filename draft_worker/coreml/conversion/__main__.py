"""The conversion process: a ConversionOrder as its argument, reports as lines of JSON on standard output."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from draft_worker.coreml.conversion.build import convert
from draft_worker.coreml.package import HOST, MODEL
from protocol.child_process import Failed, claim_output
from protocol.contracts.coreml import ConversionOrder, ConversionReport, Finished
from protocol.contracts.drafters.detection import read_drafter
from protocol.errors import InputError, PipelineError
from protocol.processes import QualityOfService, set_quality_of_service

Report: TypeAlias = Callable[[ConversionReport], None]


def main() -> int:
    # The parent handles Ctrl-C and sends SIGTERM; SystemExit then removes the incomplete folder.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report: Report = claim_output()
    set_quality_of_service(QualityOfService.UTILITY)
    order = msgspec.json.decode(sys.argv[1], type=ConversionOrder)
    try:
        report(_convert(order, report))
    except PipelineError as error:
        report(Failed(str(error), isinstance(error, InputError)))
        return 1
    except OSError as error:
        text = f"{order.destination} could not be written ({error}): free disk space, or pass another folder."
        report(Failed(text, input_error=False))
        return 1
    return 0


def _convert(order: ConversionOrder, report: Report) -> Finished:
    began = time.monotonic()
    folder = Path(order.destination)
    source = Path(order.source)
    if drafter := read_drafter(source):
        raise InputError(f"{source} holds {drafter.name}, which has no form for Core ML: use it as it is.")
    package = convert(source, folder, order.choices, report)
    return Finished(
        folder=str(folder),
        package_bytes=sum(part.stat().st_size for part in (folder / MODEL).rglob("*") if part.is_file()),
        host_bytes=(folder / HOST).stat().st_size,
        context=package.context,
        seconds=time.monotonic() - began,
    )


if __name__ == "__main__":
    sys.exit(main())
