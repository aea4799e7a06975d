"""Converts a model for Core ML in a separate process. Knows the process's reports, and nothing of Core ML."""

from collections.abc import Generator
from pathlib import Path

from orchestrator.machine.reporting_process import reports
from protocol.contracts.coreml.conversion import Choices, ConversionOrder, ConversionReport, Finished, Progress

_GRACE = 5.0
"""Seconds for the process to remove an unfinished conversion."""


def conversion(
    source: Path, destination: Path, choices: Choices, target: Path | None = None
) -> Generator[Progress | Finished, None, None]:
    """Progress as it happens, and the outcome last. Closing it early ends the process. `target`: of a trained drafter.

    Raises InputError or PipelineError with the process's own sentence if the conversion fails.
    """
    order = ConversionOrder(
        source=str(source), destination=str(destination), choices=choices, target="" if target is None else str(target)
    )
    return reports(
        "draft_worker.coreml.conversion",
        order,
        ConversionReport,
        (Finished,),
        name="The conversion",
        grace=_GRACE,
    )
