"""Trains a drafter in a separate process. Knows the process's reports, and nothing of networks."""

from collections.abc import Generator
from typing import Any

from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.reporting_process import reports
from protocol.contracts.training import TrainingFinished, TrainingOrder, TrainingPaused, TrainingReport

_GRACE = 120.0
"""Seconds for the process to save its state, in which it may have to finish a row."""


def training(order: TrainingOrder, threads: int) -> Generator[Any, None, None]:
    """TrainingProgress as it happens, TrainingFinished or TrainingPaused last. Closing it early saves the state.

    Raises InputError or PipelineError with the process's own sentence if the training fails. `threads`: processor
    threads, where the processor computes.
    """
    return reports(
        "draft_worker.training",
        order,
        TrainingReport,
        (TrainingFinished, TrainingPaused),
        name="The training",
        grace=_GRACE,
        variables=worker_environment("draft", range(threads)),
    )
